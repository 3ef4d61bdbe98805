# How things are built: library, command, example, benchmarks, CUDA backend.

obj = $(patsubst %.c,$(B)/obj/%.o,$(1))
LIB_OBJ := $(call obj,$(LIB_SRC))
CLI_OBJ := $(call obj,$(CLI_SRC))
EXAMPLE_OBJ := $(call obj,$(EXAMPLE_SRC))
GPT_OBJ := $(call obj,$(GPT_SRC))
BENCH_SUPPORT_OBJ := $(call obj,$(filter bench/support/%,$(BENCH_PART_SRC)))
BENCH_QUALITY_OBJ := $(call obj,$(filter bench/lossy/%,$(BENCH_PART_SRC)))
MPI_OBJ := $(call obj,$(MPI_SRC))
S3_OBJ := $(call obj,$(S3_SRC))
CUDA_OBJ := $(patsubst %.cu,$(B)/obj/%.cu.o,$(CUDA_SRC))

STATIC_LIB := $(B)/libckptdelta.a
SHARED_LIB := $(B)/libckptdelta.so.$(VERSION)
CUDA_LIB := $(if $(HAVE_CUDA),$(B)/libckptdelta_cuda.so)
MPI_LIB := $(if $(HAVE_MPI),$(B)/libckptdelta_mpi.so)
S3_LIB := $(if $(HAVE_S3),$(B)/libckptdelta_s3.so)
CLI := $(B)/ckptdelta
MPI_EXAMPLES := $(if $(HAVE_MPI),$(B)/train_mpi $(B)/train_pipeline)
EXAMPLE := $(B)/train_gpt $(MPI_EXAMPLES)
SMALL_EXAMPLES := $(patsubst examples/%.c,$(B)/examples/%,$(SMALL_EXAMPLE_SRC))
# Programs lie in one folder, whatever folder their source lies in.
BENCHES := $(patsubst %.c,$(B)/bench/%,$(notdir $(BENCH_SRC)))
COMPLETIONS := $(addprefix $(B)/completions/,ckptdelta.bash _ckptdelta ckptdelta.fish)
PROGRAMS := $(STATIC_LIB) $(SHARED_LIB) $(CUDA_LIB) $(MPI_LIB) $(S3_LIB) $(CLI) $(EXAMPLE) $(SMALL_EXAMPLES) $(B)/man/.made $(COMPLETIONS)

say = @printf '  %-8s %s\n' $(1) $(2)

# A change of compiler or flags rebuilds; an unchanged one touches nothing. The first line of a build checks for the
# libraries, so that what is missing is named at once.
$(B)/.flags: FORCE
	@mkdir -p $(@D)
	@printf '%s\n' '$(subst ','\'',$(CC) $(CKD_CPPFLAGS) $(CKD_CFLAGS) $(CKD_LDFLAGS) $(CKD_LIBS) $(NVCC) $(NVCC_FLAGS))' >$@.new
	@if cmp -s $@.new $@; then rm -f $@.new; else \
	    CC='$(CC)' DEPS_PREFIX='$(DEPS_PREFIX)' scripts/setup-deps.sh --check build && mv $@.new $@; fi
	@case '$(B)' in build/current) ;; build/*) ln -sfn '$(patsubst build/%,%,$(B))' build/current ;; esac

# Nor does what was linked from a file that is gone stay: a change of the list of files links anew.
$(B)/.objects: FORCE
	@mkdir -p $(@D)
	@echo '$(LIB_OBJ) $(CLI_OBJ) $(EXAMPLE_OBJ) $(CUDA_OBJ)' >$@.new
	@if cmp -s $@.new $@; then rm -f $@.new; else mv $@.new $@; fi

SCHEMA_H := $(B)/gen/catalog_schema.h
$(SCHEMA_H): catalog/schema.sql scripts/embed-sql.sh
	@mkdir -p $(@D)
	@sh scripts/embed-sql.sh catalog_schema_sql $< >$@.new && mv $@.new $@

$(B)/obj/cli/%.o $(B)/obj/supervise/%.o: EXTRA_CPPFLAGS = $(JANSSON_CPPFLAGS)
$(B)/obj/examples/%.o: private OPT = -O3
$(B)/obj/tests/%.o: EXTRA_CPPFLAGS = $(CMOCKA_CPPFLAGS) $(JANSSON_CPPFLAGS)
# Lines for stack traces, but no variables: a fifth less time to compile and link. CFLAGS=-g has them again. What tests
# share computes most of what they compare; the tests themselves compile in a third less time with -O1.
$(B)/obj/tests/%.o: private DEBUG = -g1
$(B)/obj/tests/%.o: private OPT = -O1
$(B)/obj/tests/support/%.o: private OPT = -O2

$(B)/obj/%.o: %.c $(B)/.flags | $(SCHEMA_H)
	$(call say,CC,$<)
	@mkdir -p $(@D)
	@$(CC) $(CKD_CPPFLAGS) $(EXTRA_CPPFLAGS) $(CKD_CFLAGS) -MMD -MP -c -o $@ $<

# One relocatable object whose internal names are made local: a program that links the archive sees ckd_ names only.
$(B)/ckptdelta.o: $(LIB_OBJ) $(B)/.objects
	@$(CC) -r -nostdlib -o $@.new $(LIB_OBJ)
	@$(OBJCOPY) --localize-hidden $@.new $@ && rm -f $@.new

$(STATIC_LIB): $(B)/ckptdelta.o
	$(call say,AR,$@)
	@rm -f $@ && $(AR) rcs $@ $<

$(SHARED_LIB): $(LIB_OBJ) $(B)/.objects mk/libckptdelta.map
	$(call say,LINK,$@)
	@$(CC) -shared -Wl,-soname,libckptdelta.so.$(SOVERSION) -Wl,--version-script=mk/libckptdelta.map \
	    $(if $(SANFLAGS),,-Wl$(comma)--no-undefined) $(CKD_LDFLAGS) -o $@ $(LIB_OBJ) $(CKD_LIBS)
	@ln -sfn $(@F) $(B)/libckptdelta.so.$(SOVERSION)
	@ln -sfn libckptdelta.so.$(SOVERSION) $(B)/libckptdelta.so

$(B)/ckptdelta: $(CLI_OBJ) $(B)/.objects $(STATIC_LIB)
	$(call say,LINK,$@)
	@$(CC) $(CKD_LDFLAGS) $(PROGRAM_LDFLAGS) -o $@ $(CLI_OBJ) $(STATIC_LIB) $(CKD_LIBS) $(JANSSON_LIBS)

$(B)/train_gpt: $(EXAMPLE_OBJ) $(B)/.objects $(STATIC_LIB)
	$(call say,LINK,$@)
	@$(CC) $(CKD_LDFLAGS) $(PROGRAM_LDFLAGS) -o $@ $(EXAMPLE_OBJ) $(STATIC_LIB) $(CKD_LIBS)

$(MPI_EXAMPLES): $(B)/%: $(B)/obj/examples/%.o $(B)/obj/examples/mpi_job.o $(GPT_OBJ) $(B)/.objects $(STATIC_LIB)
	$(call say,LINK,$@)
	@$(CC) $(CKD_LDFLAGS) $(PROGRAM_LDFLAGS) -o $@ $(filter %.o,$^) $(STATIC_LIB) $(CKD_LIBS) $(MPI_LIBS)

# Linked as users link them: to the shared library, which lies in the folder above.
$(SMALL_EXAMPLES): $(B)/examples/%: $(B)/obj/examples/%.o $(SHARED_LIB)
	$(call say,LINK,$@)
	@mkdir -p $(@D)
	@$(CC) $(CKD_LDFLAGS) -Wl,-rpath,'$$ORIGIN/..' -o $@ $< -L$(B) -lckptdelta

# What the command's help says, as records, and what is made of them: manual pages and completions of shells.
$(B)/gen/help.tsv: $(CLI) scripts/help-records.sh
	@mkdir -p $(@D)
	@sh scripts/help-records.sh $< >$@.new && mv $@.new $@

$(B)/man/.made: $(B)/gen/help.tsv scripts/man.awk
	$(call say,MAN,$(@D))
	@rm -rf $(@D) && mkdir -p $(@D)
	@awk -v folder='$(@D)' -f scripts/man.awk $< $< && touch $@

$(B)/completions/ckptdelta.bash: private SHELL_NAME = bash
$(B)/completions/_ckptdelta: private SHELL_NAME = zsh
$(B)/completions/ckptdelta.fish: private SHELL_NAME = fish
$(COMPLETIONS): $(B)/completions/%: completions/% $(B)/gen/help.tsv scripts/completions.awk
	@mkdir -p $(@D)
	@awk -v shell=$(SHELL_NAME) -f scripts/completions.awk $(B)/gen/help.tsv $< >$@.new && mv $@.new $@

# Everything of the library with its internal names still visible: for tests and benchmarks, which look inside.
$(B)/obj/internal.a: $(LIB_OBJ) $(B)/.objects
	@rm -f $@ && $(AR) rcs $@ $(LIB_OBJ)

$(foreach s,$(BENCH_SRC),$(eval $(B)/bench/$(notdir $(s:.c=)): $(call obj,$(s) $(filter $(dir $(s))%,$(BENCH_PART_SRC)))))
$(BENCHES): $(BENCH_SUPPORT_OBJ) $(B)/obj/internal.a
	$(call say,LINK,$@)
	@mkdir -p $(@D)
	@$(CC) $(CKD_LDFLAGS) -Wl,-rpath,'$$ORIGIN/..' -o $@ $(filter %.o,$^) $(B)/obj/internal.a $(CKD_LIBS)

$(B)/bench/bench_stall: $(B)/bench/slow_disk.so
$(B)/bench/slow_disk.so: $(B)/obj/bench/support/slow_disk.o
	$(call say,LINK,$@)
	@mkdir -p $(@D)
	@$(CC) -shared $(CKD_LDFLAGS) -o $@ $<

$(B)/obj/mpi/%.o $(B)/obj/tests/mpi/%.o $(B)/obj/bench/ranks/mpi_%.o $(B)/obj/examples/mpi_job.o \
    $(MPI_EXAMPLES:$(B)/%=$(B)/obj/examples/%.o): EXTRA_CPPFLAGS = -Impi $(MPI_CPPFLAGS)

$(B)/libckptdelta_mpi.so: $(MPI_OBJ) $(B)/.objects $(SHARED_LIB) mk/libckptdelta.map
	$(call say,LINK,$@)
	@$(CC) -shared -Wl,-soname,libckptdelta_mpi.so -Wl,--version-script=mk/libckptdelta.map $(CKD_LDFLAGS) -o $@ \
	    $(MPI_OBJ) -L$(B) -lckptdelta $(MPI_LIBS)

# What it needs of base/ is linked in: it is opened beside the library, and shares nothing with it but calls.
$(B)/obj/objects/s3/%.o: EXTRA_CPPFLAGS = $(S3_CPPFLAGS)
$(B)/libckptdelta_s3.so: $(S3_OBJ) $(B)/obj/internal.a mk/libckptdelta.map
	$(call say,LINK,$@)
	@$(CC) -shared -Wl,-soname,libckptdelta_s3.so -Wl,--version-script=mk/libckptdelta.map \
	    $(if $(SANFLAGS),,-Wl$(comma)--no-undefined) $(CKD_LDFLAGS) -o $@ $(S3_OBJ) $(B)/obj/internal.a $(S3_LIBS) $(SYS_LIBS)

# Run by bench_ranks, beside which it stands.
$(B)/bench/bench_ranks: $(if $(HAVE_MPI),$(B)/bench/mpi_save)
$(B)/bench/mpi_save: $(B)/obj/bench/ranks/mpi_save.o $(B)/obj/bench/ranks/state.o $(MPI_LIB) $(SHARED_LIB)
	$(call say,LINK,$@)
	@mkdir -p $(@D)
	@$(CC) $(CKD_LDFLAGS) -Wl,-rpath,'$$ORIGIN/..' -o $@ $(filter %.o,$^) -L$(B) -lckptdelta_mpi -lckptdelta $(MPI_LIBS)

$(B)/obj/%.cu.o: %.cu $(B)/.flags
	$(call say,NVCC,$<)
	@mkdir -p $(@D)
	@echo 'compiler: $(NVCC_VERSION)' >$(@:.o=.ptxas)
	@$(NVCC) $(NVCC_FLAGS) -Xptxas -v -I. -Iinclude -MMD -MP -MF $(@:.o=.d) -c -o $@ $< 2>>$(@:.o=.ptxas) || \
	    { grep -v -e 'ptxas info' -e 'bytes stack frame' $(@:.o=.ptxas); rm -f $(@:.o=.ptxas); exit 1; }

.PHONY: cuda-resources
cuda-resources: $(CUDA_OBJ)
	@$(or $(wildcard /usr/bin/python3),python3) scripts/cuda_resources.py $(CUDA_OBJ:.o=.ptxas) >kernels/cuda/RESOURCES.md
	$(call say,WROTE,kernels/cuda/RESOURCES.md)

# The CUDA runtime is linked statically and finds the driver itself: the backend loads, and says no, where none is.
$(B)/libckptdelta_cuda.so: $(CUDA_OBJ) $(B)/.objects mk/libckptdelta.map
	$(call say,LINK,$@)
	@$(NVCC) -shared -cudart static $(CUDA_ARCHS) -Xlinker -soname=libckptdelta_cuda.so \
	    -Xlinker --version-script=mk/libckptdelta.map -Xlinker --as-needed \
	    $(if $(CUBLAS_DIR),-L$(CUBLAS_DIR) -Xlinker -rpath=$(CUBLAS_DIR)) -o $@ $(CUDA_OBJ) \
	    -Xlinker $(if $(CUBLAS_LIB),-l:$(notdir $(CUBLAS_LIB)),-lcublas)

-include $(patsubst %.o,%.d,$(LIB_OBJ) $(CLI_OBJ) $(EXAMPLE_OBJ) $(call obj,$(SMALL_EXAMPLE_SRC)) $(CUDA_OBJ) $(MPI_OBJ) $(S3_OBJ) \
    $(call obj,$(wildcard examples/*mpi*.c examples/train_*.c bench/*/*.c)))
