/*
 * ckptdelta, parity: files from which chunk files that are lost or damaged are rebuilt. Part of ckptdelta.h, which includes it; the same conventions hold.
 *
 * Chunk files of similar size form groups of at most `data` files, each with `parity` files of parity: of all of these together any `parity` may be lost, or damaged in the
 * same place, and all come back bit for bit. Parity is made on request, beside whatever else is done with the store, and never changes a chunk file. What is stored
 * after that is covered by the next call.
 */
#ifndef CKPTDELTA_PARITY_H
#define CKPTDELTA_PARITY_H

#include "ckptdelta.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CKD_PARITY_DATA_MAX 128
#define CKD_PARITY_MAX      16

typedef struct ckd_parity_options {
    size_t struct_size;
    const char *run; /* NULL: all runs */
    /*
     * Files of a group at most, and of its parity; stored with the store for the run, or for all that have none of their own, as what later calls without keep up.
     * Both 0: as is stored. More than one file of parity takes ISA-L (libisal2) to make, and to rebuild from.
     */
    uint32_t data, parity;
    int off;                     /* instead: none from now on; what there is, is removed */
    int dry_run;                 /* count only */
    uint64_t bytes_per_s;        /* to read at most; 0: no limit */
    ckd_progress_fn on_progress; /* told of bytes read; groups that are complete stay if it cancels */
    void *progress_context;
} ckd_parity_options;
#define CKD_PARITY_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_parity_options) }

typedef struct ckd_parity_result {
    uint64_t groups, files, file_bytes;     /* that were made now, and the chunk files they cover */
    uint64_t parity_bytes;                  /* what they take */
    uint64_t removed_groups, removed_bytes; /* which were of no use any more */
    ckd_verify_result *found;               /* what was read, and damage met, which no parity was made of */
} ckd_parity_result;
/*
 * Makes the parity that is missing, group after group, each durable before the next; ended at any point, the next call goes on. Chunk files are read through before they are
 * covered. Groups that are not full are made anew with what has come since, those of which a member was deleted from what is left. The store is
 * open for writing. Errors: INVALID, NOT_FOUND (no setting is stored, and none was given), READ_ONLY, STATE (there is no ISA-L), BUSY (another call makes
 * or uses parity), CANCELLED, NOSPACE, IO, NOMEM.
 */
CKD_API ckd_status ckd_store_parity(ckd_parity_result **out, ckd_store *store,
                                    const ckd_parity_options *options, ckd_error *err);
CKD_API void ckd_parity_result_free(ckd_parity_result *result);

typedef struct ckd_parity_setting {
    char run[CKD_RUN_MAX + 1]; /* "": all runs that have none of their own */
    uint32_t data, parity;     /* both 0: none */
    ckd_status status;         /* CKD_OK, or why it cannot be read */
} ckd_parity_setting;

typedef struct ckd_parity_status {
    uint64_t groups, parity_files, parity_bytes;
    uint64_t
        weak_groups; /* which have lost something, a member that was deleted included: fewer losses than they were made for can be repaired */
    uint64_t spent_groups;      /* of these, such that can take no further loss */
    uint64_t files, file_bytes; /* chunk files of checkpoints that are listed, or can be taken back */
    uint64_t covered_files, covered_bytes; /* of these, such that would come back if they were lost now */
    uint64_t unreadable;                   /* parity files of which not even is known what they are for */
    size_t setting_count;
    ckd_parity_setting *settings;
} ckd_parity_status;
/* What is covered, by names and sizes of files alone: ckd_store_verify looks into them. Release with ckd_parity_status_free. Errors: IO, NOMEM. */
CKD_API ckd_status ckd_store_parity_status(ckd_parity_status **out, ckd_store *store, ckd_error *err);
CKD_API void ckd_parity_status_free(ckd_parity_status *status);

typedef struct ckd_repair_options {
    size_t struct_size;
    int dry_run;                 /* change nothing; find out what could be repaired */
    int purge;                   /* also remove what earlier repairs have put aside */
    uint64_t bytes_per_s;        /* to read at most; 0: no limit */
    ckd_progress_fn on_progress; /* told of bytes read; what was repaired stays if it cancels */
    void *progress_context;
    const char *
        manifest_run; /* with manifest_step: a checkpoint to bring back that may be lost or deleted; NULL: none */
    uint64_t manifest_step;
} ckd_repair_options;
#define CKD_REPAIR_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_repair_options) }

typedef struct ckd_repaired {
    const char *file;  /* path inside the store */
    const char *what;  /* was wrong, one sentence */
    const char *aside; /* where the damaged file is now; "" if there was none */
    uint64_t bytes;
} ckd_repaired;

typedef struct ckd_repair_result {
    size_t repaired_count;
    ckd_repaired *repaired;  /* with dry_run: what could be */
    ckd_verify_result *left; /* what was read, and the damage that stays, with the checkpoints it costs */
    uint64_t purged_files, purged_bytes;
} ckd_repair_result;
/*
 * Reads the whole store through, as a quick verification does, and rebuilds what is lost or damaged: chunk files and parity files from their groups. A file is rebuilt beside the damaged one, checked against its manifest down to each record, made durable, and only then
 * takes its name; the damaged one stays as data/q/NAME.TIME until it is purged. A manifest that is gone is written again. If the only catalog that knows its checkpoint is older than some deletion, the checkpoint may have been
 * deleted: a message tells so, and it comes back only if manifest_run and manifest_step name it. Errors: NOT_FOUND (no catalog knows that one, or its manifest is there), READ_ONLY, BUSY (another call makes or uses parity), CANCELLED, NOSPACE, IO,
 * NOMEM. That something cannot be repaired is a result, not an error.
 */
CKD_API ckd_status ckd_store_repair(ckd_repair_result **out, ckd_store *store,
                                    const ckd_repair_options *options, ckd_error *err);
CKD_API void ckd_repair_result_free(ckd_repair_result *result);

#ifdef __cplusplus
}
#endif
#endif
