/*
 * ckptdelta, copying checkpoints from one store to another. Part of ckptdelta.h, which includes it; the same conventions hold.
 *
 * A copy is the same checkpoint: it has the same id, and loads to the same bits. So one that a store has already is known, and never moved again, however it came
 * there.
 */
#ifndef CKPTDELTA_TRANSFER_H
#define CKPTDELTA_TRANSFER_H

#include "ckptdelta.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ckd_copy_options {
    size_t struct_size;
    const char *
        as_run; /* the run's name in the destination; NULL: the same. All checkpoints asked for are of one run then */
    int tags;                    /* also the tags of the checkpoints asked for */
    int dry_run;                 /* change nothing; only say what would be done */
    uint64_t bytes_per_s;        /* to move at most; 0: no limit */
    ckd_progress_fn on_progress; /* told of bytes of chunk files */
    void *progress_context;
} ckd_copy_options;
#define CKD_COPY_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_copy_options) }

typedef enum ckd_copy_state {
    CKD_COPY_MOVED = 1,    /* copied */
    CKD_COPY_PRESENT = 2,  /* it was there already; files of it that were damaged there were replaced */
    CKD_COPY_RESTORED = 3, /* it was in the destination's trash, and was brought back */
    CKD_COPY_LEFT = 4      /* not copied: it is damaged; or it is there, and damaged there */
} ckd_copy_state;
typedef struct ckd_copied {
    ckd_checkpoint checkpoint; /* as it is in the destination, or would be */
    ckd_copy_state state;
    uint64_t
        bytes; /* of its manifest and those of its chunk files that the destination lacked; PRESENT: of files that were replaced; with dry_run about, where only some records of a file come */
    ckd_error left; /* CKD_COPY_LEFT: why; else status CKD_OK */
} ckd_copied;
typedef struct ckd_copy_result {
    size_t count;
    ckd_copied *items;                  /* what was asked for */
    uint64_t checkpoints, files, bytes; /* moved; with dry_run: what would be */
    uint64_t tags;                      /* set */
    uint64_t left;                      /* of the items */
} ckd_copy_result;

/*
 * Copies checkpoints of the store `from` to the store `to`, which is open for writing, each with all records that a load of it reads, and that are not there. Those that they
 * build on are not copied as checkpoints unless they are asked for. Of a chunk file that these checkpoints read less than about nine tenths of, only the records that they read come, in a new file with an id of its own; others come as they
 * are, with the same ids and root hashes. NULL for `checkpoints`: all of
 * them; those whose manifests cannot be read are not listed, and left out. Records are checked against their checksums when they are read, and the file again when it has
 * arrived; then the checkpoint is committed, by itself. Parents, branch origins and resumes stay what they are, also where the
 * destination has no such checkpoint; of pins, policies and timings nothing is copied.
 *
 * It can be ended at any time. Checkpoints that were committed stay; of the one under way what has arrived lies in the destination, and a later copy
 * from the same store goes on there. What nobody goes on with is removed after a week, by whoever opens the store for writing.
 *
 * Others may save, load and copy in both stores meanwhile; nothing is removed for good in either of them, and nothing is deleted in the destination that the copy
 * depends on. `from` may be open for reading, also on a medium that is read-only. With dry_run `to` may be open for reading, too, or NULL for a store
 * that does not exist yet. out may be NULL; release with ckd_copy_result_free.
 *
 * A checkpoint that is damaged in `from` is left, and everything else is copied. Then the call fails, with the first reason, although it came to its end, and
 * sets *out all the same: each that was left says why. A chunk file with several checkpoints of which some are damaged is brought for the others. One that is
 * damaged in `to` is replaced, also one of a checkpoint that was there: its files are looked at by header, index and footer, or read through if it comes back from the trash.
 * What was there stays as data/q/NAME.TIME. If `from` has no whole one, the checkpoint is left.
 *
 * Errors: INVALID (both are the same store; an id twice; as_run), NOT_FOUND (a checkpoint of `from`), EXISTS (the destination has another checkpoint at that run and step, or this
 * one elsewhere and as_run is given, or the tag on another one: nothing was copied), CORRUPT and UNSUPPORTED (damage in `from`, or in `to` that `from` cannot replace: err->file names it; *out is set), STATE (what was there was deleted meanwhile), BUSY (another copy between the two is under way), READ_ONLY, NOSPACE, IO, NOMEM,
 * CANCELLED.
 */
CKD_API ckd_status ckd_copy(ckd_copy_result **out, ckd_store *to, ckd_store *from, const ckd_id *checkpoints,
                            size_t count, const ckd_copy_options *options, ckd_error *err);
CKD_API void ckd_copy_result_free(ckd_copy_result *result);

#ifdef __cplusplus
}
#endif
#endif
