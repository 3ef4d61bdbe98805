/*
 * What ranks' files become: the tensors of one checkpoint, and where their elements lie.
 *
 *   import_plan_make   opens the files, finds out what each of their tensors is and checks that all of it fits together
 *                      (import_plan.c, import_check.c, import_tile.c)
 *   import_pieces_make where the elements of one tensor lie in the files
 *   import_read        its values, all copies compared or averaged (import_read.c)
 *
 * Memory: a few hundred bytes for each tensor of each rank, not values.
 */
#ifndef CLI_IMPORT_PLAN_H
#define CLI_IMPORT_PLAN_H

#include "cli/inputs.h"
#include "cli/layout.h"

/* A rank's tensor, or one of its parts that has a tensor of its own in the checkpoint. */
typedef struct import_entry {
    char *name; /* in the checkpoint */
    const layout_rule *rule;
    size_t part; /* LAYOUT_NONE: kept together, or none */
    uint32_t rank;
    uint32_t
        set; /* the rank with all cut axes at 0: entries of one rule and set are one copy of the tensor */
    const safetensors_file *file;
    const safetensors_tensor *tensor;
    size_t order; /* as they come */
} import_entry;

typedef struct import_tensor {
    safetensors_tensor tensor;   /* of the checkpoint; its name is the first entry's */
    const import_entry *entries; /* by rule, set, rank */
    size_t count;
    size_t copies; /* of what there is most of, where parts are repeated */
} import_tensor;

/* A tensor that a rule skips. */
typedef struct import_skipped {
    const char *name; /* in the files */
    uint32_t rank, line;
} import_skipped;

typedef struct import_plan {
    const layout *layout;
    safetensors_file **files;
    uint32_t *ranks; /* of the files */
    size_t file_count;
    import_entry *entries;
    size_t entry_count;
    import_tensor *tensors; /* in the order of their first entries */
    size_t count;
    import_skipped *skipped;
    size_t skipped_count;
    uint64_t *matched; /* tensors of ranks that each rule is about */
    json_t *metadata;  /* what all files that have the key agree about; NULL if there is none */
    char **disagreed;  /* keys that they do not */
    size_t disagreed_count;
    uint64_t bytes;
} import_plan;

/* Release with import_plan_free, also after a failure. Errors: MISMATCH and INVALID (the message has the rule's file and line), NOT_FOUND,
 * CORRUPT, UNSUPPORTED, IO, NOMEM. */
ckd_status import_plan_make(import_plan *out, const layout *l, char *const *paths, size_t count,
                            ckd_error *err);
void import_plan_free(import_plan *plan);

/* Steps of it. Finds shapes, checks that each rank has what it is to have, and nothing else. */
ckd_status import_check(import_plan *plan, import_tensor *t, ckd_error *err);
/* All elements of all tensors are there exactly once in the first copy. Counts copies. */
ckd_status import_check_tiling(import_plan *plan, ckd_error *err);

/* A box that is one in the checkpoint's tensor and in the rank's. */
typedef struct import_piece {
    const import_entry *entry;
    size_t copy;                    /* 0, 1, ...; the first has all of it, others may have parts only */
    uint64_t offsets[CKD_MAX_DIMS]; /* in the checkpoint's tensor */
    uint64_t lengths[CKD_MAX_DIMS];
    uint64_t at; /* in the rank's tensor, along `dim`; in the others it begins at 0 */
    uint32_t dim;
} import_piece;

typedef struct import_pieces {
    import_piece *items; /* by rule and set, of which each has its copies; none is empty */
    size_t count, copies;
} import_pieces;
ckd_status import_pieces_make(import_pieces *out, const import_plan *plan, const import_tensor *t,
                              ckd_error *err);
void import_pieces_free(import_pieces *p);

/* The shape of the tensor of this entry's rank, and what it holds, by the rule. Release with layout_share_free. */
ckd_status import_share(layout_share *out, const import_plan *plan, const import_tensor *t,
                        const layout_rule *rule, uint32_t rank, const uint64_t *totals, ckd_error *err);
/* Of the parts, along the main dimension: as the rule says, else from the shape of the tensor t. */
ckd_status import_totals(uint64_t **out, const import_tensor *t, const layout_rule *rule, size_t part,
                         ckd_error *err);

/* Reads values of one tensor after the other. */
typedef struct import_reader import_reader;
ckd_status import_reader_new(import_reader **out, const import_plan *plan, ckd_error *err);
void import_reader_free(import_reader *reader);
/* Elements first ... first + count - 1 of the tensor. MISMATCH if copies differ. */
ckd_status import_read(import_reader *reader, const import_tensor *t, uint64_t first, uint64_t count,
                       void *to, ckd_error *err);

/* "[3, 4]" */
layout_text import_shape_text(uint32_t ndim, const uint64_t *shape);

#endif
