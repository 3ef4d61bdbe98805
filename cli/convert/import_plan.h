/*
 * Turns ranks' files into the tensors of one checkpoint, and finds where their elements are.
 *
 * import_plan_make   opens the files, identifies their tensors and checks that everything fits together
 *                    (import_plan.c, import_flat.c, import_check.c, import_tile.c)
 * import_pieces_make finds the elements of one tensor in the files
 * import_read        reads its values; all copies are compared or averaged (import_read.c)
 *
 * Memory: a few hundred bytes per tensor and rank; no values.
 */
#ifndef CLI_IMPORT_PLAN_H
#define CLI_IMPORT_PLAN_H

#include "cli/files/inputs.h"
#include "cli/layout/layout.h"

/* A rank's tensor, or a part of it that is a separate tensor in the checkpoint. */
typedef struct import_entry {
    char *name; /* in the checkpoint */
    const layout_rule *rule;
    size_t part; /* LAYOUT_NONE: kept together, or there are no parts */
    uint32_t rank;
    /* the rank with all cut axes set to 0: entries with the same rule and set form one copy of the tensor */
    uint32_t set;
    const safetensors_file *file; /* NULL: the rank has no flat buffer, and would have nothing in it */
    /* the rank's tensor; for a parameter in a flat buffer, its equivalent */
    const safetensors_tensor *tensor;
    /* rule of the flat buffer that contains it; NULL: not in a flat buffer */
    const layout_rule *flat;
    const safetensors_tensor *stored; /* the file's tensor with its elements: the same, or the buffer */
    layout_range range;               /* which elements, and their position: all, or some */
    size_t order;                     /* input order */
    size_t member;                    /* index in the buffer */
} import_entry;

/* A tensor of a rank's file, or a parameter of a flat buffer. */
typedef struct import_reference {
    const safetensors_file *file;
    const safetensors_tensor *tensor, *stored;
    const layout_rule *flat;
    layout_range range;
    uint32_t rank;
    bool taken; /* already imported */
    size_t order, member;
} import_reference;

typedef struct import_references {
    const import_reference *items; /* sorted by name and rank */
    size_t count;
} import_references;

/* A parameter as if it were a rank's tensor. */
typedef struct import_parameter {
    safetensors_tensor tensor; /* it owns its name */
    const layout_rule *flat;
    uint32_t rank;
} import_parameter;

typedef struct import_tensor {
    safetensors_tensor tensor;   /* of the checkpoint; its name is the first entry's */
    const import_entry *entries; /* sorted by rule, set, rank */
    size_t count;
    size_t copies; /* largest number of copies, if parts are repeated */
} import_tensor;

/* A tensor that a rule skips. */
typedef struct import_skipped {
    const char *name; /* in the files */
    uint32_t rank, line;
} import_skipped;

typedef struct import_plan {
    const layout *layout;
    safetensors_file **files;
    uint32_t *ranks; /* ranks of the files */
    size_t file_count;
    import_entry *entries;
    size_t entry_count;
    import_tensor *tensors; /* in the order of their first entries */
    size_t count;
    import_skipped *skipped;
    size_t skipped_count;
    import_parameter **parameters; /* of flat buffers */
    size_t parameter_count;
    uint64_t *matched; /* per rule: number of matching rank tensors */
    json_t *metadata;  /* metadata on which all files with the key agree; NULL if none */
    char **disagreed;  /* keys on which they disagree */
    size_t disagreed_count;
    uint64_t bytes;
} import_plan;

/*
 * Makes the plan. Release with import_plan_free, also after a failure. Errors: MISMATCH and INVALID (the message has
 * the rule's file and line), NOT_FOUND, CORRUPT, UNSUPPORTED, IO, NOMEM.
 */
ckd_status import_plan_make(import_plan *out, const layout *l, char *const *paths, size_t count,
                            ckd_error *err);
void import_plan_free(import_plan *plan);

/* Steps of import_plan_make. This one adds a rank's tensor by the bound rule. */
ckd_status import_add_entries(import_plan *plan, const import_reference *r, const layout_binding *b,
                              const uint64_t numbers[LAYOUT_NUMBERS], const uint32_t at[LAYOUT_AXES],
                              ckd_error *err);
/*
 * Adds the parameters of the flat buffers with one name: references first ... end - 1 of `all`. b: the rules that match
 * the name.
 */
ckd_status import_add_buffers(import_plan *plan, const import_references *all, size_t first, size_t end,
                              const layout_bindings *b, ckd_error *err);
/* Checks that no tensor found elsewhere is one that load would put into a flat buffer. */
ckd_status import_check_buffers(import_plan *plan, const import_references *all, ckd_error *err);
/* Returns the first reference with this name and rank; NULL if there is none. */
const import_reference *import_find_reference(const import_references *all, const char *name, uint32_t rank);
/* Finds shapes. Checks that each rank has exactly what it should have. */
ckd_status import_check(import_plan *plan, import_tensor *t, ckd_error *err);
/* Checks that the first copy has every element of every tensor exactly once. Counts copies. */
ckd_status import_check_coverage(import_plan *plan, ckd_error *err);

/* A box that is contiguous as a box both in the checkpoint's tensor and in the rank's. */
typedef struct import_piece {
    const import_entry *entry;
    size_t copy;                    /* 0, 1, ...; copy 0 is complete, others may have some parts only */
    uint64_t offsets[CKD_MAX_DIMS]; /* in the checkpoint's tensor */
    uint64_t lengths[CKD_MAX_DIMS];
    uint64_t local[CKD_MAX_DIMS]; /* its start in the rank's tensor */
} import_piece;

typedef struct import_pieces {
    import_piece *items; /* by rule and set, each with its own copies; no piece is empty */
    size_t count, copies;
} import_pieces;
ckd_status import_pieces_make(import_pieces *out, const import_plan *plan, const import_tensor *t,
                              ckd_error *err);
void import_pieces_free(import_pieces *p);

/* Computes the shape of a rank's tensor, and its content by the rule. Release with layout_share_free. */
ckd_status import_share(layout_share *out, const layout *l, const layout_rule *rule, uint32_t rank,
                        const layout_whole *whole, ckd_error *err);
/* Returns the parts' totals along the main dimension: from the rule, else from the shape of tensor t. */
ckd_status import_totals(uint64_t **out, const import_tensor *t, const layout_rule *rule, size_t part,
                         ckd_error *err);

/* Reads values, one tensor after the other. */
typedef struct import_reader import_reader;
ckd_status import_reader_new(import_reader **out, const import_plan *plan, ckd_error *err);
void import_reader_free(import_reader *reader);
/* Reads elements first ... first + count - 1 of the tensor. MISMATCH if copies differ. */
ckd_status import_read(import_reader *reader, const import_tensor *t, uint64_t first, uint64_t count,
                       void *to, ckd_error *err);

#endif
