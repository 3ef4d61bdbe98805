/*
 * What ranks' files become: the tensors of one checkpoint, and where their elements lie.
 *
 *   import_plan_make   opens the files, finds out what each of their tensors is and checks that all of it fits together
 *                      (import_plan.c, import_flat.c, import_check.c, import_tile.c)
 *   import_pieces_make where the elements of one tensor lie in the files
 *   import_read        its values, all copies compared or averaged (import_read.c)
 *
 * Memory: a few hundred bytes for each tensor of each rank, not values.
 */
#ifndef CLI_IMPORT_PLAN_H
#define CLI_IMPORT_PLAN_H

#include "cli/files/inputs.h"
#include "cli/layout/layout.h"

/* A rank's tensor, or one of its parts that has a tensor of its own in the checkpoint. */
typedef struct import_entry {
    char *name; /* in the checkpoint */
    const layout_rule *rule;
    size_t part; /* LAYOUT_NONE: kept together, or none */
    uint32_t rank;
    uint32_t
        set; /* the rank with all cut axes at 0: entries of one rule and set are one copy of the tensor */
    const safetensors_file *file;     /* NULL: the rank has no flat buffer, and would have nothing in it */
    const safetensors_tensor *tensor; /* the rank's; of a parameter in a flat buffer, what would be one */
    const layout_rule *flat;          /* by which it is in a flat buffer; NULL: it is not */
    const safetensors_tensor
        *stored;        /* the tensor of the file that has its elements: the same, or the buffer */
    layout_range range; /* which elements these are, and where: all, or some */
    size_t order;       /* as they come */
    size_t member;      /* of the buffer */
} import_entry;

/* A tensor of a rank's file, or a parameter of a flat buffer. */
typedef struct import_reference {
    const safetensors_file *file;
    const safetensors_tensor *tensor, *stored;
    const layout_rule *flat;
    layout_range range;
    uint32_t rank;
    bool taken; /* it is imported as it is */
    size_t order, member;
} import_reference;

/* A parameter as a tensor of a rank. */
typedef struct import_parameter {
    safetensors_tensor tensor; /* its name is owned */
    const layout_rule *flat;
    uint32_t rank;
} import_parameter;

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
    import_parameter **parameters; /* of flat buffers */
    size_t parameter_count;
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

/* Steps of it. One more tensor of a rank, by the rule that is bound. */
ckd_status import_add_entries(import_plan *plan, const import_reference *r, const layout_binding *b,
                              const uint64_t numbers[LAYOUT_NUMBERS], const uint32_t at[LAYOUT_AXES],
                              ckd_error *err);
/*
 * The parameters of the flat buffers of one name: references first ... end - 1 of `all`, which are in the order of names and ranks.
 * b: the rules that match that name.
 */
ckd_status import_add_buffers(import_plan *plan, const import_reference *all, size_t count, size_t first,
                              size_t end, const layout_bindings *b, ckd_error *err);
/* Nothing that was found elsewhere is what load would put into a flat buffer. */
ckd_status import_check_buffers(import_plan *plan, const import_reference *all, size_t count, ckd_error *err);
/* The first of a name and a rank; NULL if there is none. */
const import_reference *import_find_reference(const import_reference *all, size_t count, const char *name,
                                              uint32_t rank);
/* Finds shapes, checks that each rank has what it is to have, and nothing else. */
ckd_status import_check(import_plan *plan, import_tensor *t, ckd_error *err);
/* All elements of all tensors are there exactly once in the first copy. Counts copies. */
ckd_status import_check_coverage(import_plan *plan, ckd_error *err);

/* A box that is one in the checkpoint's tensor and in the rank's. */
typedef struct import_piece {
    const import_entry *entry;
    size_t copy;                    /* 0, 1, ...; the first has all of it, others may have parts only */
    uint64_t offsets[CKD_MAX_DIMS]; /* in the checkpoint's tensor */
    uint64_t lengths[CKD_MAX_DIMS];
    uint64_t local[CKD_MAX_DIMS]; /* its beginning in the rank's tensor */
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

#endif
