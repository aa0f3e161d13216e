# What every kernel's Makefile includes. It sets SRC, the harness, and PROFILE, a regex for the kernel that ncu shows;
# where the harness compiles more than what is used, SPILL_SRC, which compiles just that.
#
# make test        right or not, exit status 0 or 1
# make bench       test, then times: JSON lines to $(OUT)/bench.jsonl, a table to the terminal; dgxlab import reads them;
#                  RIVAL=.../libggml-cuda.so adds llama.cpp's own kernel, or another library's that the harness knows how to call
# make ncu         the profiler's view of one launch, of what ONE says, by default ROWS x COLS
# make sanitize    test, or the part of it that SANITIZED names, under compute-sanitizer: memcheck, racecheck, initcheck,
#                  synccheck
# make ptx sass    what the compiler made of it
# make spills      fails on spilled registers, local memory or serialised wgmma, on every architecture in SPILL_ARCHS;
#                  needs no GPU
# make clean
#
# ARCH is the architecture as nvcc names it; native is the GPU that is here.

ARCH        ?= native
SPILL_ARCHS ?= sm_80 sm_90 sm_121
OUT         ?= build
NVCC        ?= nvcc
# as ggml compiles its kernels
NVCCFLAGS   ?= -std=c++17 -O3 -use_fast_math -lineinfo -Xcompiler -Wall,-Wextra
ROWS        ?= 4096
COLS        ?= 14336
ONE         ?= $(ROWS) $(COLS)
SANITIZED   ?= test
SPILL_SRC   ?= $(SRC)

ifndef SRC
$(error SRC is not set: the Makefile that includes common.mk names its harness)
endif
ifndef PROFILE
$(error PROFILE is not set: the Makefile that includes common.mk names its kernel)
endif

COMMON  := $(dir $(lastword $(MAKEFILE_LIST)))
SOURCES := $(SRC) $(wildcard $(COMMON)*/*.cuh)
HARNESS := $(OUT)/harness-$(ARCH)
# racecheck does not follow __syncwarp: where it would have to, every lane arrives in the harness that it gets
RACECHECKED := $(HARNESS)$(if $(MBARRIERS),-racecheck)

.PHONY: test bench ncu sanitize ptx sass spills clean
.DELETE_ON_ERROR:

test: $(HARNESS)
	$(HARNESS) test

# a failed bench leaves no file that could be imported
bench: test
	$(HARNESS) bench $(RIVAL) > $(OUT)/bench.part
	mv $(OUT)/bench.part $(OUT)/bench.jsonl

ncu: $(HARNESS)
	ncu --clock-control none --set full --kernel-name-base demangled --kernel-name "regex:$(PROFILE)" \
	    $(HARNESS) one $(ONE)

sanitize: $(HARNESS) $(RACECHECKED)
	for tool in memcheck initcheck synccheck; do \
	    compute-sanitizer --tool $$tool --error-exitcode 1 $(HARNESS) $(SANITIZED) || exit 1; \
	done
	compute-sanitizer --tool racecheck --error-exitcode 1 $(RACECHECKED) $(SANITIZED)

ptx: $(OUT)/harness-$(ARCH).ptx
	@echo $<

sass: $(HARNESS)
	cuobjdump --dump-sass $< > $(OUT)/harness-$(ARCH).sass
	@echo $(OUT)/harness-$(ARCH).sass

spills: $(SPILL_ARCHS:%=spills-%)

# every kernel's line, so that a compiler that says nothing does not pass
spills-%: $(SPILL_SRC) $(SOURCES) | $(OUT)
	$(NVCC) $(NVCCFLAGS) -arch=$* -Xptxas -v -cubin -o $(OUT)/spills-$*.cubin $(SPILL_SRC) 2> $(OUT)/spills-$*.txt \
	    || { cat $(OUT)/spills-$*.txt; exit 1; }
	@grep -q 'bytes stack frame' $(OUT)/spills-$*.txt || { echo "$*: ptxas reported no kernel"; exit 1; }
	@! grep -B1 -E '[1-9][0-9]* bytes (stack frame|spill)' $(OUT)/spills-$*.txt
	@! grep '(C75' $(OUT)/spills-$*.txt
	@grep -E 'Compiling|Used' $(OUT)/spills-$*.txt | sed -E "s/ptxas info +: (Compiling entry function )?//"

clean:
	rm -rf $(OUT)

$(OUT):
	mkdir -p $@

$(HARNESS): $(SOURCES) $(MAKEFILE_LIST) | $(OUT)
	$(NVCC) $(NVCCFLAGS) -arch=$(ARCH) -o $@ $(SRC)

$(HARNESS)-racecheck: $(SOURCES) $(MAKEFILE_LIST) | $(OUT)
	$(NVCC) $(NVCCFLAGS) -DW4A16_EVERY_LANE_ARRIVES -arch=$(ARCH) -o $@ $(SRC)

$(OUT)/harness-$(ARCH).ptx: $(SOURCES) | $(OUT)
	$(NVCC) $(NVCCFLAGS) -arch=$(ARCH) -ptx -o $@ $(SRC)
