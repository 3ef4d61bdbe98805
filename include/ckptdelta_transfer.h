/*
 * ckptdelta, copying checkpoints between stores. Part of ckptdelta.h, which includes it; the same conventions hold.
 *
 * A copy is the same checkpoint: it has the same id and loads to the same bits. A store therefore recognises a
 * checkpoint that it has, however it arrived, and does not copy it again.
 */
#ifndef CKPTDELTA_TRANSFER_H
#define CKPTDELTA_TRANSFER_H

#include "ckptdelta.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ckd_copy_options {
    size_t struct_size;
    const ckd_id *checkpoints; /* those to copy; NULL: all of them */
    size_t count;              /* of checkpoints */
    /* the run's name in the destination; NULL: unchanged. All requested checkpoints must then be of one run. */
    const char *as_run;
    int tags;                    /* also copy the tags of the requested checkpoints */
    int dry_run;                 /* change nothing; report what would be done */
    uint64_t bytes_per_s;        /* transfer limit; 0: none */
    ckd_progress_fn on_progress; /* counts bytes of chunk files */
    void *progress_context;
} ckd_copy_options;
#define CKD_COPY_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_copy_options) }

typedef enum ckd_copy_state {
    CKD_COPY_MOVED = 1,    /* copied */
    CKD_COPY_PRESENT = 2,  /* already in the destination; its damaged files there were replaced */
    CKD_COPY_RESTORED = 3, /* restored from the destination's trash */
    /* not copied: it is damaged, or it is in the destination and damaged there, or its trash cannot restore it */
    CKD_COPY_LEFT = 4
} ckd_copy_state;
typedef struct ckd_copied {
    ckd_checkpoint checkpoint; /* as in the destination, or as it would be */
    ckd_copy_state state;
    /*
     * Bytes of its manifest, and of its chunk files that the destination lacked. PRESENT: of replaced files.
     * Approximate with dry_run where only some records of a file are copied.
     */
    uint64_t bytes;
    ckd_error left; /* CKD_COPY_LEFT: why; otherwise the status is CKD_OK */
} ckd_copied;
typedef struct ckd_copy_result {
    size_t count;
    ckd_copied *items;                  /* the requested checkpoints */
    uint64_t checkpoints, files, bytes; /* moved; with dry_run: to be moved */
    uint64_t tags;                      /* tags set */
    uint64_t left;                      /* items with state CKD_COPY_LEFT */
} ckd_copy_result;

/*
 * Copies checkpoints from the store `from` to the store `to`, which must be open for writing. If all are requested,
 * those with unreadable manifests are left out, because they are not listed. Each comes with all records that a load of
 * it reads and the destination lacks. The checkpoints that it builds on are copied as checkpoints only if requested. If
 * the copied checkpoints read less than about nine tenths of a chunk file, only those records are copied, into a new
 * file with its own id. Other files are copied unchanged, with the same ids and root hashes. Records are checked
 * against their checksums when read, and the file again on arrival. Each checkpoint is then committed on its own.
 * Parents, branch origins and resumes stay the same, even if the destination lacks those checkpoints. Pins, policies
 * and timings are not copied.
 *
 * The copy can be interrupted at any time. Committed checkpoints stay. Partial data remains in the destination, and a
 * later copy from the same store continues there. After a week without progress it is removed when the store is opened
 * for writing.
 *
 * Both stores may be used by saves, loads and other copies meanwhile. Nothing is removed for good in either of them,
 * and nothing that the copy depends on is deleted in the destination. `from` may be open for reading, even on a
 * read-only medium. With dry_run, `to` may also be open for reading, or NULL for a store that does not exist yet. out
 * may be NULL; release with ckd_copy_result_free.
 *
 * A checkpoint that is damaged in `from` is left out, and everything else is copied. The call then finishes its work,
 * sets *out, and fails with the first reason; each item left out says why. If some checkpoints of a chunk file are
 * damaged, the file is still copied for the others. A file that is damaged in `to` is replaced, even for a checkpoint
 * that was already there. Files there are checked by header, index and footer, or read through if the checkpoint
 * returns from the trash. The replaced file stays as data/q/NAME.TIME. If `from` has no intact copy of the file, the
 * checkpoint is left out.
 *
 * A checkpoint in the trash of `to` that ckd_store_undelete refuses is left out in the same way.
 *
 * Errors: INVALID (both are the same store; a duplicate id; as_run), NOT_FOUND (a checkpoint of `from`), EXISTS (the
 * destination has another checkpoint at that run and step, or has this one elsewhere and as_run is set, or has the tag
 * on another one: then nothing was copied, unless that came meanwhile; or, if *out is set, one stays in the trash of
 * `to`), CORRUPT and UNSUPPORTED (damage in `from`, or in `to` that `from` cannot replace; err->file names it; *out is
 * set), STATE (a checkpoint there was deleted meanwhile), BUSY (another copy between the two is in progress, or a run is
 * being renamed in `to`), READ_ONLY, NOSPACE, IO, NOMEM, CANCELLED.
 */
CKD_API ckd_status ckd_copy(ckd_copy_result **out, ckd_store *to, ckd_store *from,
                            const ckd_copy_options *options, ckd_error *err);
CKD_API void ckd_copy_result_free(ckd_copy_result *result);

#ifdef __cplusplus
}
#endif
#endif
