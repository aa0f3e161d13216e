"""Statistics: pure functions of the standard library; every public name of a module here is public in the package."""

from dgxlab.stats.bisection import *
from dgxlab.stats.chain import *
from dgxlab.stats.distributions import *
from dgxlab.stats.fleet import *
from dgxlab.stats.online import *
from dgxlab.stats.precision import *
from dgxlab.stats.verdict import *
