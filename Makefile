# ckptdelta. `make help` says what there is; mk/config.mk holds options and flags, mk/build.mk and mk/test.mk the rules.

.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.SUFFIXES:
SHELL := /bin/sh

include mk/config.mk

.PHONY: all programs demo demo-run demo-torch demo-torch-run bench bench-build bench-build-run bench-run bench-quality bench-quality-run bench-kernels bench-kernels-run help config print-build-dir print-cflags install install-files uninstall clean FORCE
FORCE:

include mk/build.mk
include mk/python.mk
include mk/test.mk

all:
	@+$(SUBMAKE) programs

programs: $(PROGRAMS)

demo:
	@CC='$(CC)' DEPS_PREFIX='$(DEPS_PREFIX)' scripts/setup-deps.sh build
	@+$(SUBMAKE) demo-run

demo-run: programs
	@sh examples/demo.sh '$(B)'

demo-torch:
	@CC='$(CC)' DEPS_PREFIX='$(DEPS_PREFIX)' scripts/setup-deps.sh build
	@+$(SUBMAKE) demo-torch-run

demo-torch-run: programs python-package
	@PYTHON='$(PYTHON)' sh examples/demo_torch.sh '$(B)'

bench:
	@+$(SUBMAKE) bench-run

bench-run: programs $(BENCHES)
	@'$(B)/bench/bench_exact' $(BENCH_ARGS)

bench-build:
	@+$(SUBMAKE) bench-build-run

bench-build-run: $(BENCHES)

bench-quality:
	@+$(SUBMAKE) bench-quality-run

bench-quality-run: programs $(B)/bench/bench_quality
	@'$(B)/bench/bench_quality' $(BENCH_ARGS)

bench-kernels:
	@+$(SUBMAKE) bench-kernels-run

bench-kernels-run: $(B)/bench/bench_kernels
	@'$(B)/bench/bench_kernels' $(BENCH_ARGS)

print-build-dir:
	@echo '$(B)'

print-cflags:
	@echo '$(CKD_CFLAGS)'

config:
	@B='$(B)' CC='$(CC)' NVCC='$(NVCC)' PKG_CONFIG='$(PKG_CONFIG)' DEPS_PREFIX='$(DEPS_PREFIX)' CUDA_WHY='$(CUDA_WHY)' MPI_WHY='$(MPI_WHY)' S3_WHY='$(S3_WHY)' MPICC='$(MPICC)' \
	    VERSION='$(VERSION)' SAN='$(SAN)' CFLAGS_SHOWN='$(strip $(CKD_CFLAGS))' \
	    CUDA_ARCHS_SHOWN='$(filter-out -gencode,$(CUDA_ARCHS))' sh scripts/show-config.sh

# Installed in the same folders, so that links between them hold.
TOP_DOCS := LICENSE NOTICE README.md CHANGELOG.md SECURITY.md
DOCS := $(wildcard docs/*.md docs/*.json)
DECISIONS := $(wildcard */DECISIONS.md */*/DECISIONS.md)
DECISION_DIRS := $(patsubst %/,%,$(dir $(DECISIONS)))
BASH_COMPLETIONS := $(DATADIR)/bash-completion/completions
ZSH_COMPLETIONS := $(DATADIR)/zsh/site-functions
FISH_COMPLETIONS := $(DATADIR)/fish/vendor_completions.d
CMAKE_DIR := $(LIBDIR)/cmake/ckptdelta
# The pages of the build are known when it has run: expanded in recipes only.
MAN_PAGES = $(wildcard $(B)/man/*.1)
INSTALL_DIRS := $(BINDIR) $(INCLUDEDIR) $(LIBDIR)/pkgconfig $(CMAKE_DIR) $(MANDIR)/man1 $(addprefix $(DOCDIR)/,examples docs $(DECISION_DIRS)) \
    $(BASH_COMPLETIONS) $(ZSH_COMPLETIONS) $(FISH_COMPLETIONS)
INSTALLED = $(BINDIR)/ckptdelta $(patsubst include/%,$(INCLUDEDIR)/%,$(PUBLIC_HEADERS)) \
    $(LIBDIR)/pkgconfig/ckptdelta.pc $(LIBDIR)/libckptdelta.a $(LIBDIR)/libckptdelta.so $(LIBDIR)/libckptdelta.so.$(SOVERSION) $(LIBDIR)/libckptdelta.so.$(VERSION) \
    $(LIBDIR)/libckptdelta_cuda.so $(LIBDIR)/libckptdelta_s3.so $(LIBDIR)/libckptdelta_mpi.so $(INCLUDEDIR)/ckptdelta_mpi.h $(LIBDIR)/pkgconfig/ckptdelta_mpi.pc \
    $(CMAKE_DIR)/ckptdelta-config.cmake $(CMAKE_DIR)/ckptdelta-config-version.cmake \
    $(BASH_COMPLETIONS)/ckptdelta $(ZSH_COMPLETIONS)/_ckptdelta $(FISH_COMPLETIONS)/ckptdelta.fish \
    $(addprefix $(DOCDIR)/,$(TOP_DOCS) $(DOCS) $(DECISIONS) codec/FORMAT.md $(SMALL_EXAMPLE_SRC))
# Folders that are ours, if nobody put anything else there.
INSTALLED_DIRS := $(addprefix $(DOCDIR)/,examples docs $(DECISION_DIRS) engine cli) $(DOCDIR) $(CMAKE_DIR)
fill_in = sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@LIBDIR@|$(LIBDIR)|' -e 's|@INCLUDEDIR@|$(INCLUDEDIR)|' \
    -e 's|@VERSION@|$(VERSION)|' -e 's|@SOVERSION@|$(SOVERSION)|' $(1) >'$(DESTDIR)$(2)'

install: all
	@+$(SUBMAKE) install-files

# What is in the build folder, as it is.
install-files:
	install -d $(foreach d,$(INSTALL_DIRS),'$(DESTDIR)$(d)')
	install -m 644 $(PUBLIC_HEADERS) '$(DESTDIR)$(INCLUDEDIR)'
	install -m 644 '$(STATIC_LIB)' '$(DESTDIR)$(LIBDIR)/libckptdelta.a'
	install -m 755 '$(SHARED_LIB)' '$(DESTDIR)$(LIBDIR)/libckptdelta.so.$(VERSION)'
	ln -sfn libckptdelta.so.$(VERSION) '$(DESTDIR)$(LIBDIR)/libckptdelta.so.$(SOVERSION)'
	ln -sfn libckptdelta.so.$(SOVERSION) '$(DESTDIR)$(LIBDIR)/libckptdelta.so'
	$(call fill_in,ckptdelta.pc.in,$(LIBDIR)/pkgconfig/ckptdelta.pc)
	$(call fill_in,cmake/ckptdelta-config.cmake.in,$(CMAKE_DIR)/ckptdelta-config.cmake)
	$(call fill_in,cmake/ckptdelta-config-version.cmake.in,$(CMAKE_DIR)/ckptdelta-config-version.cmake)
	install -m 755 '$(CLI)' '$(DESTDIR)$(BINDIR)/ckptdelta'
	if [ -e '$(B)/libckptdelta_cuda.so' ]; then \
	    install -m 755 '$(B)/libckptdelta_cuda.so' '$(DESTDIR)$(LIBDIR)/libckptdelta_cuda.so'; fi
	if [ -e '$(B)/libckptdelta_s3.so' ]; then \
	    install -m 755 '$(B)/libckptdelta_s3.so' '$(DESTDIR)$(LIBDIR)/libckptdelta_s3.so'; fi
	if [ -e '$(B)/libckptdelta_mpi.so' ]; then \
	    install -m 644 mpi/ckptdelta_mpi.h '$(DESTDIR)$(INCLUDEDIR)/ckptdelta_mpi.h' && \
	    install -m 755 '$(B)/libckptdelta_mpi.so' '$(DESTDIR)$(LIBDIR)/libckptdelta_mpi.so' && \
	    $(call fill_in,ckptdelta_mpi.pc.in,$(LIBDIR)/pkgconfig/ckptdelta_mpi.pc); fi
	install -m 644 $(MAN_PAGES) '$(DESTDIR)$(MANDIR)/man1'
	install -m 644 '$(B)/completions/ckptdelta.bash' '$(DESTDIR)$(BASH_COMPLETIONS)/ckptdelta'
	install -m 644 '$(B)/completions/_ckptdelta' '$(DESTDIR)$(ZSH_COMPLETIONS)/_ckptdelta'
	install -m 644 '$(B)/completions/ckptdelta.fish' '$(DESTDIR)$(FISH_COMPLETIONS)/ckptdelta.fish'
	install -m 644 $(TOP_DOCS) '$(DESTDIR)$(DOCDIR)'
	install -m 644 $(DOCS) '$(DESTDIR)$(DOCDIR)/docs'
	install -m 644 codec/FORMAT.md '$(DESTDIR)$(DOCDIR)/codec'
	for f in $(DECISIONS); do install -m 644 $$f '$(DESTDIR)$(DOCDIR)'/$$f || exit; done
	install -m 644 $(SMALL_EXAMPLE_SRC) '$(DESTDIR)$(DOCDIR)/examples'

uninstall:
	rm -f $(foreach f,$(INSTALLED),'$(DESTDIR)$(f)') '$(DESTDIR)$(MANDIR)'/man1/ckptdelta.1 '$(DESTDIR)$(MANDIR)'/man1/ckptdelta-*.1
	rmdir $(foreach d,$(INSTALLED_DIRS),'$(DESTDIR)$(d)') 2>/dev/null || true

clean:
	rm -rf build $(if $(filter build/%,$(B)),,'$(B)')

help:
	@cat scripts/help.txt
