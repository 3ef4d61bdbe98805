# The Python package as it lies in a wheel: $(B)/python/ckptdelta/. It is complete as it stands: PYTHONPATH=$(B)/python.

PYTHON_PACKAGE := $(B)/python/ckptdelta
PYTHON_SRC := $(wildcard python/src/ckptdelta/*.py python/src/ckptdelta/*.pyi python/src/ckptdelta/py.typed)
PYTHON_FILES := $(patsubst python/src/ckptdelta/%,$(PYTHON_PACKAGE)/%,$(PYTHON_SRC))
# Python 3.10 is the oldest that the extension module loads in.
PYTHON_CPPFLAGS = -DPy_LIMITED_API=0x030a0000 -isystem $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')
PYTHON_STATIC_LIBS := -Wl,-Bstatic -lzstd -llz4 -lsqlite3 -ljansson -Wl,-Bdynamic $(SYS_LIBS)

.PHONY: python-package python-for-tests wheel wheel-run
python-package: $(PYTHON_FILES) $(PYTHON_PACKAGE)/_native.abi3.so $(patsubst $(B)/%,$(PYTHON_PACKAGE)/%,$(CUDA_LIB) $(S3_LIB)) $(PYTHON_PACKAGE)/bin/ckptdelta \
    $(PYTHON_PACKAGE)/notices.txt

$(PYTHON_FILES): $(PYTHON_PACKAGE)/%: python/src/ckptdelta/%
	@mkdir -p $(@D)
	@cp $< $@

$(B)/gen/python_native.c: python/build_native.py $(PUBLIC_HEADERS) $(B)/.flags
	$(call say,CFFI,$@)
	@mkdir -p $(@D)
	@CC='$(CC)' $(PYTHON) python/build_native.py $@.new.c >/dev/null && mv $@.new.c $@

# Generated code, which is not held to the warnings of ours.
$(B)/obj/python/native.o: $(B)/gen/python_native.c python/native.h
	$(call say,CC,$<)
	@mkdir -p $(@D)
	@$(CC) $(CKD_CPPFLAGS) $(PYTHON_CPPFLAGS) $(CKD_CFLAGS) -w -c -o $@ $<

# $(call link_package,OPTIONS AND INPUTS): the libraries of others inside if they can be, so that a wheel needs the C
# library only; else shared ones, which then have to be on the machine.
link_package = $(CC) $(CKD_LDFLAGS) -o $@ $(1) $(PYTHON_STATIC_LIBS) 2>/dev/null || $(CC) $(CKD_LDFLAGS) -o $@ $(1) $(CKD_LIBS) $(JANSSON_LIBS)

$(PYTHON_PACKAGE)/_native.abi3.so: $(B)/obj/python/native.o $(STATIC_LIB)
	$(call say,LINK,$@)
	@mkdir -p $(@D)
	@$(call link_package,-shared -Wl$(comma)-z$(comma)text -Wl$(comma)--exclude-libs$(comma)ALL $^)
	@strip --strip-unneeded $@

$(PYTHON_PACKAGE)/libckptdelta_cuda.so $(PYTHON_PACKAGE)/libckptdelta_s3.so: $(PYTHON_PACKAGE)/%: $(B)/%
	@mkdir -p $(@D)
	@cp $< $@

$(PYTHON_PACKAGE)/bin/ckptdelta: $(CLI_OBJ) $(STATIC_LIB)
	$(call say,LINK,$@)
	@mkdir -p $(@D)
	@$(call link_package,-Wl$(comma)-rpath$(comma)'$$ORIGIN/..' $^)
	@strip $@

# Whoever passes on a wheel passes on these, as the libraries of others may be in it.
NOTICES := LICENSE NOTICE docs/THIRD-PARTY.md $(wildcard $(foreach p,libzstd liblz4 libsqlite3 libjansson,/usr/share/doc/$(p)-dev/copyright))
$(PYTHON_PACKAGE)/notices.txt: $(NOTICES)
	@mkdir -p $(@D)
	@cat $^ >$@.new && mv $@.new $@

# One wheel for every Python from 3.10 on. setup.py takes what lies in the build folder.
wheel:
	@CC='$(CC)' DEPS_PREFIX='$(DEPS_PREFIX)' PYTHON='$(PYTHON)' scripts/setup-deps.sh python
	@+$(SUBMAKE) wheel-run

wheel-run: python-package
	@rm -rf '$(B)/wheel'
	@cd python && CKPTDELTA_BUILD='$(abspath $(B))' $(PYTHON) -W ignore setup.py -q bdist_wheel --dist-dir '$(abspath $(B))/wheel' >/dev/null
	@ls '$(B)'/wheel/*.whl

# Where the package cannot be built, its tests are skipped and say why.
python-for-tests: $(STATIC_LIB) $(CUDA_LIB) $(CLI_OBJ)
	@mkdir -p '$(B)/python'
	@+why='$(if $(SANFLAGS),the run time of a sanitizer cannot be loaded into Python)'; [ -n "$$why" ] || why=$$($(PYTHON) python/can_build.py); \
	if [ -n "$$why" ]; then echo "$$why" >'$(B)/python/why_not'; else rm -f '$(B)/python/why_not' && $(SUBMAKE) python-package; fi
