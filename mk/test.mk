# Tests, fuzzers and checks.

# Debian's python first: the test modules are its packages, and another python3 on PATH may lack them.
PYTHON ?= $(shell scripts/find-python.sh)
TEST_TIMEOUT ?= 900
# Of all fuzzers together.
FUZZ_SECONDS ?= 3600

# There are very many programs to link, and lld takes half the time.
TEST_LDFLAGS := $(if $(shell command -v ld.lld 2>/dev/null),-fuse-ld=lld)

TEST_SUPPORT_OBJ := $(call obj,$(TEST_SUPPORT_SRC))
# The names of tests are unique: programs lie in one folder, whatever folder their source lies in.
TESTS := $(patsubst %.c,$(B)/tests/%,$(notdir $(TEST_SRC)))
REPLAYS := $(patsubst tests/fuzz/%.c,$(B)/tests/%,$(FUZZ_SRC))
FUZZERS := $(patsubst tests/fuzz/%.c,$(B)/fuzz/%,$(FUZZ_SRC))

$(B)/tests/test_gpt: EXTRA_OBJ = $(GPT_OBJ)
$(B)/tests/test_gpt: $(GPT_OBJ)

$(B)/tests/test_excp: EXTRA_OBJ = $(B)/obj/bench/lossy/excp.o
$(B)/tests/test_excp: $(B)/obj/bench/lossy/excp.o

$(B)/tests/test_quality: EXTRA_OBJ = $(BENCH_QUALITY_OBJ) $(BENCH_SUPPORT_OBJ)
$(B)/tests/test_quality: $(BENCH_QUALITY_OBJ) $(BENCH_SUPPORT_OBJ)

$(B)/tests/test_bench_options: EXTRA_OBJ = $(BENCH_SUPPORT_OBJ)
$(B)/tests/test_bench_options: $(BENCH_SUPPORT_OBJ)

$(B)/tests/test_symbol_rates: EXTRA_OBJ = $(B)/obj/bench/support/rates.o
$(B)/tests/test_symbol_rates: $(B)/obj/bench/support/rates.o

# They call functions of the library that is opened at run time.
S3_TESTS := $(filter $(B)/tests/test_s3_parse $(B)/tests/fuzz_s3 $(B)/fuzz/fuzz_s3,$(TESTS) $(REPLAYS) $(FUZZERS))
$(S3_TESTS): EXTRA_OBJ = $(S3_OBJ) $(S3_LIBS)
$(S3_TESTS): $(S3_OBJ)
$(B)/obj/tests/objects/%.o $(B)/obj/tests/fuzz/fuzz_s3.o: EXTRA_CPPFLAGS = $(S3_CPPFLAGS) $(CMOCKA_CPPFLAGS)

# Its allocations fail when the test says so.
$(B)/tests/test_nomem: EXTRA_OBJ = $(foreach f,malloc calloc realloc strdup opendir realpath ZSTD_createCCtx ZSTD_createDCtx,\
    -Wl$(comma)--wrap=$(f))

$(B)/tests/test_lossy_trouble: EXTRA_OBJ = $(foreach f,malloc calloc realloc,-Wl$(comma)--wrap=$(f))

# So do those of single threads, and are counted.
$(B)/tests/test_session: EXTRA_OBJ = $(foreach f,malloc calloc realloc aligned_alloc,-Wl$(comma)--wrap=$(f))
$(B)/tests/test_session_cached: EXTRA_OBJ = $(foreach f,malloc calloc realloc aligned_alloc,-Wl$(comma)--wrap=$(f))
$(B)/tests/test_collective_load: EXTRA_OBJ = $(foreach f,malloc calloc realloc,-Wl$(comma)--wrap=$(f))

# The clock shows what the test says.
$(B)/tests/test_session_newest: EXTRA_OBJ = -Wl,--wrap=clock_wall_ns

# The table of kernels is the one that the test says.
$(B)/tests/test_lossy_store $(B)/tests/test_lossy_updates: EXTRA_OBJ = -Wl,--wrap=kernels_cpu

# What it changes on the disk is recorded.
POWER_OBJ := $(call obj,$(POWER_SRC))
$(B)/tests/test_power_cut: EXTRA_OBJ = $(POWER_OBJ)
$(B)/tests/test_power_cut: PROGRAM_LDFLAGS =
$(B)/tests/test_power_cut: $(POWER_OBJ)

# Tests of the command's parts link with all of it but its main().
CLI_PART_OBJ := $(filter-out $(B)/obj/cli/commands/main.o,$(CLI_OBJ))
CLI_TESTS := $(filter $(B)/tests/test_cli% $(B)/tests/test_decide% $(B)/tests/test_liveness% $(B)/tests/test_candidates% $(B)/tests/test_safetensors% $(B)/tests/fuzz_safetensors% \
    $(B)/fuzz/fuzz_safetensors% $(B)/tests/fuzz_layout% $(B)/fuzz/fuzz_layout% \
    $(B)/tests/fuzz_prices% $(B)/fuzz/fuzz_prices%,$(TESTS) $(REPLAYS) $(FUZZERS))
$(CLI_TESTS): EXTRA_OBJ = $(CLI_PART_OBJ) $(JANSSON_LIBS)
$(CLI_TESTS): $(CLI_PART_OBJ)

$(foreach s,$(TEST_SRC),$(eval $(B)/tests/$(notdir $(s:.c=)): $(call obj,$(s))))
$(TESTS): $(TEST_SUPPORT_OBJ) $(B)/obj/internal.a
	$(call say,LINK,$@)
	@mkdir -p $(@D)
	@$(CC) $(CKD_LDFLAGS) $(PROGRAM_LDFLAGS) $(TEST_LDFLAGS) -Wl,-rpath,'$$ORIGIN/..' -o $@ $(filter %/$(@F).o,$^) $(EXTRA_OBJ) $(TEST_SUPPORT_OBJ) $(B)/obj/internal.a \
	    $(CMOCKA_LIBS) $(CKD_LIBS)

# A device for programs, where there is none: CKD_CUDA=$(B)/tests/libemulated_device.so
$(B)/tests/libemulated_device.so: $(B)/obj/tests/support/emulated_device.o
	$(call say,LINK,$@)
	@mkdir -p $(@D)
	@$(CC) -shared $(CKD_LDFLAGS) -o $@ $< -pthread

# Preloaded into the command by tests/campaign/: ids, the clock and failing system calls are the campaign's.
CAMPAIGN_SHIM := $(B)/tests/libcampaign_faults.so
# Programs that tests in Python run as ranks.
CAMPAIGN_RANKS := $(B)/tests/campaign_ranks
RANK_TRAINER := $(B)/tests/rank_trainer
$(CAMPAIGN_RANKS): tests/campaign/ranks.c
$(RANK_TRAINER): tests/agent/rank_trainer.c
$(CAMPAIGN_RANKS) $(RANK_TRAINER): $(SHARED_LIB)
	$(call say,LINK,$@)
	@mkdir -p $(@D)
	@$(CC) $(CKD_CPPFLAGS) $(CKD_CFLAGS) -Iinclude $(CKD_LDFLAGS) -Wl,-rpath,'$$ORIGIN/..' -o $@ $(filter %.c,$^) -L$(B) -lckptdelta

$(CAMPAIGN_SHIM): tests/campaign/faults.c
	$(call say,LINK,$@)
	@mkdir -p $(@D)
	@$(CC) -std=gnu11 -O2 -Wall -Wextra $(if $(WERROR),-Werror) -shared -fPIC -o $@ $< -ldl

# An object that is named outright comes before the archive's member with the same functions: in what these link, all checksums match.
UNCHECKED := $(B)/obj/tests/support/unchecked.o
$(REPLAYS): $(B)/tests/%: $(B)/obj/tests/fuzz/%.o $(B)/obj/tests/support/fuzz_main.o $(UNCHECKED) $(TEST_SUPPORT_OBJ) $(B)/obj/internal.a
	$(call say,LINK,$@)
	@mkdir -p $(@D)
	@$(CC) $(CKD_LDFLAGS) $(PROGRAM_LDFLAGS) $(TEST_LDFLAGS) -o $@ $< $(EXTRA_OBJ) $(B)/obj/tests/support/fuzz_main.o $(UNCHECKED) $(TEST_SUPPORT_OBJ) \
	    $(B)/obj/internal.a $(CMOCKA_LIBS) $(CKD_LIBS)

$(FUZZERS): $(B)/fuzz/%: $(B)/obj/tests/fuzz/%.o $(UNCHECKED) $(TEST_SUPPORT_OBJ) $(B)/obj/internal.a
	$(call say,LINK,$@)
	@mkdir -p $(@D)
	@$(CC) $(CKD_LDFLAGS) -fsanitize=fuzzer -o $@ $< $(EXTRA_OBJ) $(UNCHECKED) $(TEST_SUPPORT_OBJ) $(B)/obj/internal.a \
	    $(CMOCKA_LIBS) $(CKD_LIBS)

# Run by tests/mpi/check_mpi.sh. The libraries are found beside the program's folder.
MPI_TESTS := $(if $(HAVE_MPI),$(B)/tests/mpi_ranks $(B)/tests/mpi_load $(B)/tests/mpi_nomem)
$(filter-out %/mpi_nomem,$(MPI_TESTS)): $(B)/tests/%: $(B)/obj/tests/mpi/%.o $(MPI_LIB) $(SHARED_LIB)
	$(call say,LINK,$@)
	@mkdir -p $(@D)
	@$(CC) $(CKD_LDFLAGS) -Wl,-rpath,'$$ORIGIN/..' -o $@ $< -L$(B) -lckptdelta_mpi -lckptdelta $(MPI_LIBS)

# The library's allocations fail when the test says so.
$(B)/tests/mpi_nomem: $(B)/obj/tests/mpi/mpi_nomem.o $(MPI_OBJ) $(B)/obj/internal.a
	$(call say,LINK,$@)
	@mkdir -p $(@D)
	@$(CC) $(CKD_LDFLAGS) $(foreach f,malloc calloc realloc,-Wl$(comma)--wrap=$(f)) -o $@ $^ $(CKD_LIBS) $(MPI_LIBS)

.SECONDARY: $(call obj,$(TEST_SRC) $(FUZZ_SRC) $(BENCH_SRC) $(FUZZ_SUPPORT_SRC)) $(POWER_OBJ)

# Run by the Python tests below tests/objects/. It opens the library of S3 as programs do.
OBJECTS_TOOL := $(B)/tests/objects_tool
$(OBJECTS_TOOL): $(B)/obj/tests/objects/objects_tool.o $(B)/obj/internal.a $(S3_LIB)
	$(call say,LINK,$@)
	@mkdir -p $(@D)
	@$(CC) $(CKD_LDFLAGS) $(PROGRAM_LDFLAGS) -Wl,-rpath,'$$ORIGIN/..' -o $@ $(filter %.o %.a,$^) $(CKD_LIBS)

# How thorough: tests/README.md says more.
CKD_TEST_LEVEL ?= quick
# Seconds of processor time that all tests together may take; 0: no limit. There is none for tests that are asked for by name.
BUDGET ?= $(if $(T)$(PYTEST_ARGS)$(filter-out quick,$(CKD_TEST_LEVEL)),0,220)

.PHONY: test test-full build-tests test-run fuzz fuzz-run
test:
	@CC='$(CC)' DEPS_PREFIX='$(DEPS_PREFIX)' scripts/setup-deps.sh test
	@+$(SUBMAKE) test-run

test-full:
	@+$(SUBMAKE) test CKD_TEST_LEVEL=full

build-tests: programs $(TESTS) $(REPLAYS) $(MPI_TESTS) $(OBJECTS_TOOL) $(CAMPAIGN_SHIM) $(CAMPAIGN_RANKS) $(RANK_TRAINER) $(B)/tests/libemulated_device.so python-for-tests

# One test more than there are cores at a time, as some mostly wait for a deadline or for another process.
test-run: build-tests
	@CC='$(CC)' CKPTDELTA_CFLAGS='$(SANFLAGS)' CKPTDELTA_LIBS='$(DEPS_LDFLAGS) $(CKD_LIBS)' \
	    $(PYTHON) tests/run.py --build '$(B)' --san '$(SAN)' --jobs '$(shell expr $(JOBS) + 1)' --level '$(CKD_TEST_LEVEL)' --budget '$(BUDGET)' \
	    --timeout '$(TEST_TIMEOUT)' --only '$(T)' --pytest-args '$(PYTEST_ARGS)' --cuda '$(HAVE_CUDA)'

# Clang warns of loops that it cannot vectorise under sanitizers, so warnings are no errors here.
fuzz:
	@+$(SUBMAKE) CC=clang SAN=address,undefined FUZZ=1 CUDA=0 WERROR= fuzz-run

fuzz-run: $(FUZZERS)
	@B='$(B)' sh scripts/run-fuzzers.sh '$(FUZZ_SECONDS)' $(FUZZERS)

# Random commands beside a model of what must be readable; tests/README.md says more.
.PHONY: campaign campaign-run
campaign:
	@CC='$(CC)' DEPS_PREFIX='$(DEPS_PREFIX)' scripts/setup-deps.sh test
	@+$(SUBMAKE) campaign-run

campaign-run: programs $(CAMPAIGN_SHIM) $(CAMPAIGN_RANKS)
	@CKPTDELTA_BUILD='$(abspath $(B))' CKPTDELTA_SAN='$(SAN)' $(PYTHON) tests/campaign/campaign.py \
	    --seconds '$(or $(SECONDS),60)' --seed '$(or $(SEED),1)' --jobs '$(or $(JOBS),1)' $(if $(MODE),--mode '$(MODE)') $(CAMPAIGN_ARGS)

# Failures of training jobs below `ckptdelta run`; tests/README.md says more.
.PHONY: jobs-campaign jobs-campaign-run
jobs-campaign:
	@CC='$(CC)' DEPS_PREFIX='$(DEPS_PREFIX)' scripts/setup-deps.sh test
	@+$(SUBMAKE) jobs-campaign-run

jobs-campaign-run: programs $(CAMPAIGN_SHIM) $(if $(TORCH),python-for-tests)
	@CKPTDELTA_BUILD='$(abspath $(B))' CKPTDELTA_SAN='$(SAN)' $(PYTHON) tests/campaign/jobs.py --seed '$(or $(SEED),1)' --count '$(or $(COUNT),30)' \
	    --jobs '$(or $(JOBS),1)' $(if $(TRAINERS),--trainers '$(TRAINERS)') $(if $(TORCH),--torch '$(TORCH)') $(CAMPAIGN_ARGS)

# The scorecard docs/trust.md: what is measured, and its tools, are in scripts/trust.py.
.PHONY: trust trust-run mutants
trust:
	@CC='$(CC)' DEPS_PREFIX='$(DEPS_PREFIX)' scripts/setup-deps.sh test
	@+$(SUBMAKE) trust-run

trust-run: programs
	@$(PYTHON) scripts/trust.py --build '$(B)' --rows '$(ROWS)' --length '$(or $(LENGTH),1)'

# Breaks the code in COUNT places, one at a time, and sees whether the tests notice.
mutants:
	@$(PYTHON) tests/mutants/mutants.py --count '$(or $(COUNT),20)' --seed '$(or $(SEED),1)' --campaign '$(or $(SECONDS),0)' \
	    $(foreach a,$(AREA),--area $(a))

.PHONY: check-layers check-layers-run format check-format lint
check-layers:
	@+$(SUBMAKE) check-layers-run

check-layers-run: $(LIB_OBJ) $(CLI_OBJ)
	@$(or $(wildcard /usr/bin/python3),python3) scripts/check_layers.py . --objects '$(B)/obj' --graph

C_FILES := $(wildcard $(foreach d,include base objects objects/* codec/* catalog kernels kernels/cuda engine engine/* mpi python cli/* supervise agent peers examples bench/* $(TEST_DIRS),\
             $(d)/*.c $(d)/*.h $(d)/*.cu $(d)/*.cuh))
format:
	@clang-format -i $(C_FILES)

check-format:
	@clang-format --dry-run -Werror $(C_FILES)

lint: $(SCHEMA_H)
	@B='$(B)' CKD_LINT_FLAGS='$(CKD_CPPFLAGS)' sh scripts/lint.sh $(LIB_SRC) $(CLI_SRC) $(EXAMPLE_SRC)

-include $(patsubst %.o,%.d,$(TEST_SUPPORT_OBJ) $(POWER_OBJ) $(call obj,$(TEST_SRC) $(FUZZ_SRC) $(FUZZ_SUPPORT_SRC) $(wildcard tests/mpi/*.c tests/objects/*.c)))
