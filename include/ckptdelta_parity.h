/*
 * ckptdelta, parity: files from which lost or damaged chunk files can be rebuilt. Part of ckptdelta.h, which includes
 * it; the same conventions hold.
 *
 * Chunk files of similar size form groups of up to `data` files. Each group has `parity` parity files. Any `parity`
 * files of a group may be lost, or damaged in the same place, and all can be rebuilt bit for bit. Parity is made on
 * request while the store is in use, and never changes a chunk file. The next call covers data stored since then.
 */
#ifndef CKPTDELTA_PARITY_H
#define CKPTDELTA_PARITY_H

#include "ckptdelta.h"
#include "ckptdelta_verify.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CKD_PARITY_DATA_MAX 128
#define CKD_PARITY_MAX      16

typedef struct ckd_parity_options {
    size_t struct_size;
    const char *run; /* NULL: all runs */
    /*
     * Largest number of chunk files in a group, and its number of parity files. The store records them for the run, or
     * for all runs without their own setting, and later calls without values use them. Both 0: use the stored setting.
     * More than one parity file needs ISA-L (libisal2), both to make parity and to rebuild from it.
     */
    uint32_t data, parity;
    int off; /* instead: make no more parity, and remove the existing parity, except that of damaged files */
    int dry_run;                 /* count only */
    uint64_t bytes_per_s;        /* read limit; 0: none */
    ckd_progress_fn on_progress; /* Counts bytes read. If it cancels, finished groups stay. */
    void *progress_context;
} ckd_parity_options;
#define CKD_PARITY_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_parity_options) }

typedef struct ckd_parity_result {
    /* made by this call: groups, the chunk files they cover, and the bytes of those */
    uint64_t groups, files, file_bytes;
    uint64_t parity_bytes;                  /* size of the new parity files */
    uint64_t removed_groups, removed_bytes; /* obsolete groups that were removed */
    ckd_verify_result *found; /* the amounts read, and the damage found; damaged files got no parity */
} ckd_parity_result;
/*
 * Makes missing parity group by group. Each group is durable before the next begins; after an interruption the next
 * call continues. Chunk files are verified before they are covered. A group that is not full is replaced by one that
 * also has newer files. A group that lost a member by deletion is replaced by one of the remaining members. Before a
 * group is removed, its chunk files are read. It stays while one of them is missing or damaged. The store must be open
 * for writing. Errors: INVALID, NOT_FOUND (no setting is stored, and none was passed), READ_ONLY, STATE (ISA-L is
 * missing), BUSY (another call makes or uses parity), CANCELLED, NOSPACE, IO, NOMEM.
 */
CKD_API ckd_status ckd_store_parity(ckd_parity_result **out, ckd_store *store,
                                    const ckd_parity_options *options, ckd_error *err);
CKD_API void ckd_parity_result_free(ckd_parity_result *result);

typedef struct ckd_parity_setting {
    char run[CKD_RUN_MAX + 1]; /* "": all runs without their own setting */
    uint32_t data, parity;     /* both 0: no parity */
    ckd_status status;         /* CKD_OK, or why it is unreadable */
} ckd_parity_setting;

typedef struct ckd_parity_status {
    uint64_t groups, parity_files, parity_bytes;
    /* Groups that lost a file, including a deleted member. They can repair fewer losses than intended. */
    uint64_t weak_groups;
    uint64_t spent_groups;                 /* weak groups that cannot repair any further loss */
    uint64_t files, file_bytes;            /* chunk files of checkpoints that are listed or can be restored */
    uint64_t covered_files, covered_bytes; /* those that could be rebuilt if they were lost now */
    uint64_t unreadable;                   /* parity files too damaged to identify */
    size_t setting_count;
    ckd_parity_setting *settings;
} ckd_parity_status;
/*
 * Returns what is covered, from names and sizes of files only; ckd_store_verify checks their contents. Release with
 * ckd_parity_status_free. Errors: IO, NOMEM.
 */
CKD_API ckd_status ckd_store_parity_status(ckd_parity_status **out, ckd_store *store, ckd_error *err);
CKD_API void ckd_parity_status_free(ckd_parity_status *status);

typedef struct ckd_repair_options {
    size_t struct_size;
    int dry_run;                 /* change nothing; find out what could be repaired */
    int purge;                   /* also remove damaged files that earlier repairs set aside */
    uint64_t bytes_per_s;        /* read limit; 0: none */
    ckd_progress_fn on_progress; /* Counts bytes read. If it cancels, finished repairs stay. */
    void *progress_context;
    /* with manifest_step: a lost checkpoint to bring back even though it may have been deleted; NULL: none */
    const char *manifest_run;
    uint64_t manifest_step;
} ckd_repair_options;
#define CKD_REPAIR_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_repair_options) }

typedef struct ckd_repaired {
    const char *file;  /* path inside the store */
    const char *what;  /* what was wrong, in one sentence */
    const char *aside; /* where the damaged file is now; "" if there was none */
    uint64_t bytes;
} ckd_repaired;

typedef struct ckd_repair_result {
    size_t repaired_count;
    ckd_repaired *repaired; /* with dry_run: files that could be repaired */
    /* the amounts read, and the remaining damage, with the checkpoints that it makes unloadable */
    ckd_verify_result *left;
    uint64_t purged_files, purged_bytes;
} ckd_repair_result;
/*
 * Reads the whole store as a quick verification does, and rebuilds lost or damaged chunk files and parity files from
 * their groups. A file is rebuilt beside the damaged one, checked against its manifest down to each record, and made
 * durable. Only then does it take over the name. The damaged file stays as data/q/NAME.TIME until it is purged.
 *
 * A file that a compaction wrote may be beyond repair while the files that it replaced still exist and are intact. The
 * checkpoints then go back to these older files, and the file counts as repaired.
 *
 * A lost manifest is written again from its chunk files and a catalog. If the only catalog that knows its checkpoint is
 * older than some deletion, the checkpoint may have been deleted. A message then says so, and the checkpoint comes back
 * only if manifest_run and manifest_step name it.
 *
 * Damage that cannot be repaired is a result, not an error. Errors: NOT_FOUND (no catalog knows the named checkpoint,
 * or its manifest exists), READ_ONLY, BUSY (another call makes or uses parity), CANCELLED, NOSPACE, IO, NOMEM.
 */
CKD_API ckd_status ckd_store_repair(ckd_repair_result **out, ckd_store *store,
                                    const ckd_repair_options *options, ckd_error *err);
CKD_API void ckd_repair_result_free(ckd_repair_result *result);

#ifdef __cplusplus
}
#endif
#endif
