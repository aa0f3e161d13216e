"""The vocabulary: frozen records that all layers share; every public name of a module here is public in the package.

Standard library only and Python 3.10 syntax, because the agent carries this package to the host. `spec` makes
experiments, `plan` makes plans from them, `agent` runs plans and makes results.
"""

from dgxlab.model.checks import *
from dgxlab.model.experiment import *
from dgxlab.model.plan import *
from dgxlab.model.result import *
from dgxlab.model.slurm import *
from dgxlab.model.wire import *
