# ckptdelta. `make help` says what there is; mk/config.mk holds options and flags, mk/build.mk and mk/test.mk the rules.

.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.SUFFIXES:
SHELL := /bin/sh

include mk/config.mk

.PHONY: all programs demo demo-run bench bench-run bench-quality bench-quality-run bench-kernels bench-kernels-run help config print-build-dir install install-files uninstall clean FORCE
FORCE:

include mk/build.mk
include mk/test.mk

all:
	@+$(SUBMAKE) programs

programs: $(PROGRAMS)

demo:
	@CC='$(CC)' DEPS_PREFIX='$(DEPS_PREFIX)' scripts/setup-deps.sh build
	@+$(SUBMAKE) demo-run

demo-run: programs
	@sh examples/demo.sh '$(B)'

bench:
	@+$(SUBMAKE) bench-run

bench-run: programs $(BENCHES)
	@CKPTDELTA_BUILD='$(abspath $(B))' '$(B)/bench/bench_exact' $(BENCH_ARGS)

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

config:
	@B='$(B)' CC='$(CC)' NVCC='$(NVCC)' PKG_CONFIG='$(PKG_CONFIG)' DEPS_PREFIX='$(DEPS_PREFIX)' CUDA_WHY='$(CUDA_WHY)' MPI_WHY='$(MPI_WHY)' MPICC='$(MPICC)' \
	    VERSION='$(VERSION)' SAN='$(SAN)' CFLAGS_SHOWN='$(strip $(CKD_CFLAGS))' \
	    CUDA_ARCHS_SHOWN='$(filter-out -gencode,$(CUDA_ARCHS))' sh scripts/show-config.sh

PUBLIC_HEADERS := $(wildcard include/ckptdelta*.h)
INSTALLED := $(BINDIR)/ckptdelta $(patsubst include/%,$(INCLUDEDIR)/%,$(PUBLIC_HEADERS)) \
    $(LIBDIR)/pkgconfig/ckptdelta.pc $(LIBDIR)/libckptdelta.a $(LIBDIR)/libckptdelta.so $(LIBDIR)/libckptdelta.so.$(SOVERSION) $(LIBDIR)/libckptdelta.so.$(VERSION) \
    $(LIBDIR)/libckptdelta_cuda.so $(LIBDIR)/libckptdelta_mpi.so $(INCLUDEDIR)/ckptdelta_mpi.h

install: all
	@+$(SUBMAKE) install-files

# What is in the build folder, as it is.
install-files:
	install -d '$(DESTDIR)$(BINDIR)' '$(DESTDIR)$(INCLUDEDIR)' '$(DESTDIR)$(LIBDIR)/pkgconfig'
	install -m 644 $(PUBLIC_HEADERS) '$(DESTDIR)$(INCLUDEDIR)'
	install -m 644 '$(STATIC_LIB)' '$(DESTDIR)$(LIBDIR)/libckptdelta.a'
	install -m 755 '$(SHARED_LIB)' '$(DESTDIR)$(LIBDIR)/libckptdelta.so.$(VERSION)'
	ln -sfn libckptdelta.so.$(VERSION) '$(DESTDIR)$(LIBDIR)/libckptdelta.so.$(SOVERSION)'
	ln -sfn libckptdelta.so.$(SOVERSION) '$(DESTDIR)$(LIBDIR)/libckptdelta.so'
	sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@LIBDIR@|$(LIBDIR)|' -e 's|@INCLUDEDIR@|$(INCLUDEDIR)|' \
	    -e 's|@VERSION@|$(VERSION)|' ckptdelta.pc.in >'$(DESTDIR)$(LIBDIR)/pkgconfig/ckptdelta.pc'
	install -m 755 '$(CLI)' '$(DESTDIR)$(BINDIR)/ckptdelta'
	if [ -e '$(B)/libckptdelta_cuda.so' ]; then \
	    install -m 755 '$(B)/libckptdelta_cuda.so' '$(DESTDIR)$(LIBDIR)/libckptdelta_cuda.so'; fi
	if [ -e '$(B)/libckptdelta_mpi.so' ]; then \
	    install -m 644 mpi/ckptdelta_mpi.h '$(DESTDIR)$(INCLUDEDIR)/ckptdelta_mpi.h' && \
	    install -m 755 '$(B)/libckptdelta_mpi.so' '$(DESTDIR)$(LIBDIR)/libckptdelta_mpi.so'; fi

uninstall:
	rm -f $(foreach f,$(INSTALLED),'$(DESTDIR)$(f)')

clean:
	rm -rf build $(if $(filter build/%,$(B)),,'$(B)')

help:
	@cat scripts/help.txt
