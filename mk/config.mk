# What is being built, with what, and where: options, detection, flags. Nothing here has a recipe.

# --- options (see `make help`)
ifeq ($(origin CC),default)
CC := gcc
endif
OPT ?= -O2
SAN ?=
WERROR ?= 0
FUZZ ?= 0
CUDA ?= auto
DEPS_PREFIX ?=
PREFIX ?= /usr/local
BINDIR ?= $(PREFIX)/bin
LIBDIR ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
DATADIR ?= $(PREFIX)/share
MANDIR ?= $(DATADIR)/man
DOCDIR ?= $(DATADIR)/doc/ckptdelta
PKG_CONFIG ?= pkg-config
OBJCOPY ?= objcopy

comma := ,
empty :=
space := $(empty) $(empty)

# --- the build folder: one for each combination of options, so that switching back and forth rebuilds nothing
ifneq ($(filter-out 0 1,$(WERROR)),)
$(error WERROR is 0 or 1, not "$(WERROR)")
endif
ifneq ($(filter-out 0 1,$(FUZZ)),)
$(error FUZZ is 0 or 1, not "$(FUZZ)")
endif
ifneq ($(filter-out 0 1 auto,$(CUDA)),)
$(error CUDA is 0, 1 or auto, not "$(CUDA)")
endif
san_list := $(subst $(comma),$(space),$(SAN))
ifneq ($(filter-out address undefined leak thread,$(san_list)),)
$(error SAN is a comma-separated list of address, undefined, leak, thread, not "$(SAN)")
endif

own_flags := $(strip $(CFLAGS) $(CPPFLAGS) $(LDFLAGS) $(DEPS_PREFIX) $(wordlist 2,9,$(CC)))
KEY := $(notdir $(firstword $(CC)))$(subst $(space),,$(OPT))
KEY := $(KEY)$(if $(SAN),-san-$(subst $(comma),-,$(SAN)))$(if $(filter 1,$(FUZZ)),-fuzz)
KEY := $(KEY)$(if $(filter 1,$(WERROR)),-werror)$(if $(filter 0,$(CUDA)),-nocuda)
ifneq ($(own_flags),)
KEY := $(KEY)-$(firstword $(shell printf '%s' '$(own_flags)' | cksum))
endif
ifeq ($(origin O),command line)
BUILD := $(O)
endif
BUILD ?= build/$(KEY)
B := $(BUILD)

# --- sources
LIB_SRC := $(wildcard base/*.c objects/*.c objects/mirror/*.c codec/*/*.c catalog/*.c kernels/*.c engine/*.c engine/*/*.c agent/*.c peers/*.c)
CLI_SRC := $(wildcard cli/*/*.c supervise/*.c)
GPT_SRC := $(wildcard examples/gpt_*.c)
EXAMPLE_SRC := $(GPT_SRC) examples/train_gpt.c
# Programs of one file that show the use of the library; `make install` installs their sources.
SMALL_EXAMPLE_SRC := examples/save.c examples/session.c
# Each bench/*/bench_*.c is a program. The other files of its folder are its parts; two are linked by rules of their own.
BENCH_SRC := $(wildcard bench/*/bench_*.c)
BENCH_PART_SRC := $(filter-out $(BENCH_SRC) bench/support/slow_disk.c bench/ranks/mpi_save.c,$(wildcard bench/*/*.c))
TEST_DIRS := tests tests/* tests/*/* tests/*/*/*
TEST_SRC = $(filter-out $(if $(HAVE_S3),,%/test_s3_parse.c),$(wildcard $(addsuffix /test_*.c,$(TEST_DIRS))))
# What only test_power_cut has: it stands in front of the C library.
POWER_SRC := tests/support/recorder.c $(wildcard tests/support/power*.c)
FUZZ_SRC = $(filter-out $(if $(HAVE_S3),,%/fuzz_s3.c),$(wildcard tests/fuzz/fuzz_*.c))
FUZZ_SUPPORT_SRC := tests/support/fuzz_main.c tests/support/unchecked.c
TEST_SUPPORT_SRC := $(filter-out $(FUZZ_SUPPORT_SRC) $(POWER_SRC),$(wildcard tests/support/*.c))
CUDA_SRC := $(wildcard kernels/cuda/*.cu)
PUBLIC_HEADERS := $(wildcard include/ckptdelta*.h)

version_of = $(shell sed -n 's/^.define CKD_VERSION_$(1)  *\([0-9][0-9]*\).*/\1/p' include/ckptdelta.h)
SOVERSION := $(call version_of,MAJOR)
VERSION := $(SOVERSION).$(call version_of,MINOR).$(call version_of,PATCH)

# --- libraries: pkg-config where it knows them, else the usual names on the usual paths
pc_known = $(shell $(PKG_CONFIG) --exists $(1) 2>/dev/null && echo yes)
pc_flags = $(if $(call pc_known,$(1)),$(shell $(PKG_CONFIG) $(2) $(1)),$(3))
ifeq ($(DEPS_PREFIX),)
DEPS_CPPFLAGS := $(sort $(call pc_flags,libzstd liblz4 libxxhash sqlite3,--cflags,))
DEPS_LIBS := $(call pc_flags,libzstd liblz4 sqlite3,--libs,-lzstd -llz4 -lsqlite3)
JANSSON_CPPFLAGS := $(call pc_flags,jansson,--cflags,)
JANSSON_LIBS := $(call pc_flags,jansson,--libs,-ljansson)
CMOCKA_CPPFLAGS := $(call pc_flags,cmocka,--cflags,)
CMOCKA_LIBS := $(call pc_flags,cmocka,--libs,-lcmocka)
else
# A prefix of one's own: include/ and lib/, or the usr/ of Debian packages unpacked with `dpkg -x`.
deps_include := $(wildcard $(addprefix $(DEPS_PREFIX)/,include usr/include usr/include/*-linux-gnu))
deps_lib := $(wildcard $(addprefix $(DEPS_PREFIX)/,lib lib64 usr/lib usr/lib/*-linux-gnu lib/*-linux-gnu))
DEPS_CPPFLAGS := $(addprefix -isystem ,$(deps_include))
DEPS_LDFLAGS := $(foreach d,$(deps_lib),-L$(d) -Wl,-rpath,$(abspath $(d)))
DEPS_LIBS := -lzstd -llz4 -lsqlite3
JANSSON_LIBS := -ljansson
CMOCKA_LIBS := -lcmocka
endif
SYS_LIBS := -pthread -lm -ldl

# --- flags
WARNINGS := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wold-style-definition \
            -Wpointer-arith -Wvla -Wundef -Wwrite-strings -Wformat=2 -Wno-format-nonliteral
ifeq ($(WERROR),1)
WARNINGS += -Werror
endif
# Sanitizers stop at the first finding. A float that does not fit an integer is undefined behaviour, too, and differs
# between machines; -fsanitize=undefined alone does not look for it.
ifneq ($(SAN),)
SANFLAGS := -fsanitize=$(SAN) -fno-sanitize-recover=all -fno-omit-frame-pointer
SANFLAGS += $(if $(filter undefined,$(san_list)),-fsanitize=float-cast-overflow)
# A null pointer that is followed ends the program with the address sanitizer's report; a check of each pointer adds nothing.
SANFLAGS += $(if $(filter address,$(san_list)),$(if $(filter undefined,$(san_list)),-fno-sanitize=null))
endif
ifeq ($(FUZZ),1)
SANFLAGS += -fsanitize=fuzzer-no-link
endif
# Reports of sanitizers need lines, not variables: a tenth less time to compile and link. CFLAGS=-g has variables again.
DEBUG = $(if $(SAN),-g1,-g)
# -fno-fast-math, -ffp-contract=off: what a decoder computes must depend neither on CFLAGS, nor on whether the machine has
# fused multiply-add. They come last, as the last option counts.
# -fno-math-errno: a square root is an instruction, and loops with one are vectorised; the bits are the same.
FLOAT_FLAGS = -fno-fast-math -ffp-contract=off -fno-math-errno
CKD_CFLAGS = -std=gnu11 $(OPT) $(DEBUG) -fPIC -fvisibility=hidden -pthread $(WARNINGS) $(SANFLAGS) $(CFLAGS) $(FLOAT_FLAGS)
# _GNU_SOURCE is empty, as sources that define it themselves have it.
CKD_CPPFLAGS = -I. -Iinclude -I$(B)/gen -D_FILE_OFFSET_BITS=64 -D_GNU_SOURCE= $(DEPS_CPPFLAGS) $(CPPFLAGS)
# The run path lets dlopen find the CUDA backend next to the program (build folder) or in ../lib (installed).
CKD_LDFLAGS = -pthread $(SANFLAGS) -Wl,--as-needed -Wl,-rpath,'$$ORIGIN:$$ORIGIN/../lib' $(DEPS_LDFLAGS) $(LDFLAGS)
CKD_LIBS = $(DEPS_LIBS) $(SYS_LIBS)
# The undefined-behaviour sanitizer describes each of its checks in data with addresses. A program at a fixed address needs
# no relocation of these: it starts in a sixth less time, and the tests start thousands.
PROGRAM_LDFLAGS := $(if $(filter address,$(san_list)),-no-pie)

# --- CUDA: the backend is a shared object of its own, opened at run time; nothing else is compiled differently
CUDA_HOME ?= /usr/local/cuda
NVCC ?= $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard $(CUDA_HOME)/bin/nvcc))
# Where nvcc's toolkit, or CUBLAS_PREFIX (include/ and lib/, as Python's packages have it), has cuBLAS: its header, and (for the backend's run path, as not
# every system knows it) its library.
CUBLAS_PREFIX ?=
cuda_root := $(if $(NVCC),$(patsubst %/bin/nvcc,%,$(realpath $(NVCC))))
CUBLAS_H := $(wildcard $(addsuffix /cublas_v2.h,$(addsuffix /include,$(CUBLAS_PREFIX)) $(cuda_root)/include $(cuda_root)/targets/*/include /usr/include /usr/include/*-linux-gnu))
cublas_dirs := $(addsuffix /lib,$(CUBLAS_PREFIX)) $(cuda_root)/lib64 $(cuda_root)/lib $(cuda_root)/targets/*/lib
CUBLAS_LIB := $(abspath $(firstword $(foreach d,$(cublas_dirs),$(wildcard $(d)/libcublas.so $(d)/libcublas.so.*))))
CUBLAS_DIR := $(patsubst %/,%,$(dir $(CUBLAS_LIB)))
CUDA_ARCHS := -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 \
              -gencode arch=compute_90,code=compute_90
# The same arithmetic as the CPU: no contraction, no flush to zero, correctly rounded division and square root.
NVCC_FLAGS = -std=c++17 -O3 $(addprefix -I,$(addsuffix /include,$(CUBLAS_PREFIX))) --fmad=false --ftz=false --prec-div=true --prec-sqrt=true $(CUDA_ARCHS) \
             -Xcompiler -fPIC,-fvisibility=hidden,-ffp-contract=off,-Wall,-Wextra $(if $(filter 1,$(WERROR)),-Werror all-warnings)
CUDA_WHY :=
ifeq ($(CUDA_SRC),)
CUDA_WHY := no: there are no CUDA sources
else ifeq ($(CUDA),0)
CUDA_WHY := no: CUDA=0
else ifeq ($(NVCC),)
ifeq ($(CUDA),1)
$(error CUDA=1, but nvcc is neither on PATH nor in $(CUDA_HOME)/bin: set CUDA_HOME or NVCC)
endif
CUDA_WHY := no: nvcc not found
else ifeq ($(CUBLAS_H)$(filter 1,$(CUDA)),)
CUDA_WHY := no: nvcc is there, but cublas_v2.h is not (CUDA=1 tries all the same)
endif
HAVE_CUDA := $(if $(CUDA_WHY),,yes)
NVCC_VERSION := $(if $(HAVE_CUDA),nvcc $(shell $(NVCC) --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\), V\([0-9.]*\).*/\2/p'))

# --- MPI: libckptdelta_mpi, for MPI programs; nothing else is compiled differently. Not with sanitizers: MPI itself leaks.
MPI_SRC := $(wildcard mpi/*.c)
MPICC ?= $(shell command -v mpicc 2>/dev/null)
MPI_CPPFLAGS := $(if $(MPICC),$(shell $(MPICC) --showme:compile 2>/dev/null))
MPI_LIBS := $(if $(MPICC),$(shell $(MPICC) --showme:link 2>/dev/null))
MPI_WHY :=
ifeq ($(MPI),0)
MPI_WHY := no: MPI=0
else ifneq ($(SAN)$(filter 1,$(FUZZ)),)
MPI_WHY := no: with a sanitizer
else ifeq ($(MPI_LIBS),)
ifeq ($(MPI),1)
$(error MPI=1, but there is no mpicc of Open MPI: install libopenmpi-dev and openmpi-bin, or set MPICC)
endif
MPI_WHY := no: Open MPI's mpicc not found
endif
HAVE_MPI := $(if $(MPI_WHY),,yes)

# --- S3: libckptdelta_s3, opened at run time where a store is s3://...; nothing else is compiled differently
S3_SRC := $(wildcard objects/s3/*.c)
S3 ?= auto
ifneq ($(filter-out 0 1 auto,$(S3)),)
$(error S3 is 0, 1 or auto, not "$(S3)")
endif
ifeq ($(DEPS_PREFIX),)
s3_found := $(shell $(PKG_CONFIG) --exists 'libcurl >= 7.88' expat libcrypto jansson 2>/dev/null && echo yes)
S3_CPPFLAGS := $(if $(s3_found),$(shell $(PKG_CONFIG) --cflags libcurl expat libcrypto jansson))
S3_LIBS := $(if $(s3_found),$(shell $(PKG_CONFIG) --libs libcurl expat libcrypto jansson))
else
s3_found := $(and $(wildcard $(addsuffix /curl/curl.h,$(deps_include))),$(wildcard $(addsuffix /expat.h,$(deps_include))),$(wildcard $(addsuffix /openssl/evp.h,$(deps_include))))
S3_LIBS := -lcurl -lexpat -lcrypto -ljansson
endif
S3_WHY :=
ifeq ($(S3),0)
S3_WHY := no: S3=0
else ifeq ($(s3_found),)
ifeq ($(S3),1)
$(error S3=1, but libcurl 7.88, expat, libcrypto or jansson is missing: install libcurl4-openssl-dev, libexpat1-dev, libssl-dev, libjansson-dev)
endif
S3_WHY := no: libcurl 7.88, expat, libcrypto or jansson is missing
endif
HAVE_S3 := $(if $(S3_WHY),,yes)

# --- as many jobs as there are cores, unless told otherwise: in a recipe, $(SUBMAKE) GOAL. (Only recipes can see -j.)
JOBS := $(shell nproc 2>/dev/null || echo 2)
SUBMAKE = $(MAKE) --no-print-directory $(if $(findstring -j,$(MAKEFLAGS)),,-j$(JOBS))
