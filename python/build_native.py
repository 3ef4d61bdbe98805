"""Writes the C source of ckptdelta._native: build_native.py OUTPUT.c

What Python sees of the library is read from the public headers, so the two cannot differ. CC is the compiler whose
preprocessor reads them. Needs cffi.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import cffi

HERE = Path(__file__).resolve().parent
INCLUDE = HERE.parent / "include"

# Types and functions of native.h.
OWNERS = """
typedef struct pyckd_store { ckd_store *store; ...; } pyckd_store;
ckd_status pyckd_store_open(pyckd_store *owner, const char *path, ckd_open_mode mode, const ckd_store_options *options,
                            ckd_error *err);
void pyckd_store_close(pyckd_store *owner);
typedef struct pyckd_save { ckd_save *save; int committed; ...; } pyckd_save;
ckd_status pyckd_save_begin(pyckd_save *owner, ckd_store *store, const ckd_save_options *options, ckd_error *err);
ckd_status pyckd_save_commit(ckd_checkpoint *info, pyckd_save *owner, ckd_error *err);
ckd_status pyckd_save_publish(ckd_checkpoint *info, pyckd_save *owner, const ckd_part *parts, size_t count,
                              ckd_error *err);
void pyckd_save_end(pyckd_save *owner);
void pyckd_save_abort(pyckd_save *owner);
typedef struct pyckd_load { ckd_load *load; ...; } pyckd_load;
ckd_status pyckd_load_begin(pyckd_load *owner, ckd_store *store, const ckd_id *checkpoint,
                            const ckd_load_options *options, ckd_error *err);
void pyckd_load_end(pyckd_load *owner);
typedef struct pyckd_session { ckd_session *session; ...; } pyckd_session;
ckd_status pyckd_session_open(pyckd_session *owner, const char *path, const ckd_session_options *options, ckd_error *err);
ckd_status pyckd_session_save(pyckd_session *owner, uint64_t step, uint32_t group, int all, ckd_error *err);
uint64_t pyckd_session_last(ckd_checkpoint *out, pyckd_session *owner);
ckd_status pyckd_session_close(pyckd_session *owner, ckd_error *err);
typedef struct pyckd_follow { ckd_follow *follow; ...; } pyckd_follow;
ckd_status pyckd_follow_open(pyckd_follow *owner, const char *path, const ckd_store_options *store_options,
                             const ckd_follow_options *options, ckd_error *err);
void pyckd_follow_close(pyckd_follow *owner);
typedef struct pyckd_changes { uint64_t *positions; uint8_t *values; size_t count; size_t value_size; ...; } pyckd_changes;
ckd_status pyckd_follow_changes(pyckd_changes *out, ckd_load *before, ckd_load *after, const ckd_changes_request *request,
                                ckd_error *err);
void pyckd_changes_free(pyckd_changes *changes);
void pyckd_checkpoints_free(ckd_checkpoint_list **list);
void pyckd_tensors_free(ckd_tensor_list **list);
void pyckd_verified_free(ckd_verify_result **result);
void pyckd_prune_free(ckd_prune **prune);
void pyckd_trash_free(ckd_trash **trash);
typedef struct pyckd_blob { void *data; size_t size; } pyckd_blob;
ckd_status pyckd_blob_load(pyckd_blob *owner, ckd_load *load, const char *name, ckd_error *err);
void pyckd_blob_free(pyckd_blob *owner);
"""
CALLBACKS = """
extern "Python" int pyckd_on_progress(void *context, uint64_t done, uint64_t total);
extern "Python" void pyckd_on_message(void *context, const char *message);
extern "Python" void pyckd_on_info(void *context, const char *message);
"""
CONSTANTS = ["CKD_NAME_MAX", "CKD_RUN_MAX", "CKD_MAX_DIMS", "CKD_BLOB_MAX", "CKD_NO_OFFSET", "CKD_LATEST", "CKD_NO_COMPACTION", "CKD_PROGRESS_NO_RANK"]


def declarations() -> str:
    """What the public headers declare, after the preprocessor, without what they include of others."""
    command = [*shlex.split(os.environ.get("CC") or "cc"), "-E", f"-I{INCLUDE}", str(INCLUDE / "ckptdelta.h")]
    lines, own = [], False
    for line in subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines():
        marker = re.match(r'# \d+ "([^"]*)"', line)
        if marker:
            own = Path(marker.group(1)).parent == INCLUDE
        elif own:
            lines.append(line)
    return "\n".join(lines).replace('__attribute__((visibility("default")))', "")


def builder() -> cffi.FFI:
    ffi = cffi.FFI()
    ffi.cdef(declarations())
    ffi.cdef("".join(f"#define {name} ...\n" for name in CONSTANTS))
    ffi.cdef(OWNERS + CALLBACKS)
    ffi.set_source("ckptdelta._native", '#include "python/native.h"\n')
    return ffi


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    builder().emit_c_code(sys.argv[1])
