/* Declarations that only the files of cli/convert/ use. */
#ifndef CLI_CONVERT_INTERNAL_H
#define CLI_CONVERT_INTERNAL_H

#include "cli/convert/convert.h"

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
typedef struct import_fragment {
    const import_entry *entry;
    size_t copy;                    /* 0, 1, ...; copy 0 is complete, others may have some parts only */
    uint64_t offsets[CKD_MAX_DIMS]; /* in the checkpoint's tensor */
    uint64_t lengths[CKD_MAX_DIMS];
    uint64_t local[CKD_MAX_DIMS]; /* its start in the rank's tensor */
} import_fragment;

typedef struct import_fragments {
    import_fragment *items; /* by rule and set, each with its own copies; no fragment is empty */
    size_t count, copies;
} import_fragments;
ckd_status import_fragments_make(import_fragments *out, const import_plan *plan, const import_tensor *t,
                                 ckd_error *err);
void import_fragments_free(import_fragments *p);

/* Computes the shape of a rank's tensor, and its content by the rule. Release with layout_share_free. */
ckd_status import_share(layout_share *out, const layout *l, const layout_rule *rule, uint32_t rank,
                        const layout_whole *whole, ckd_error *err);
/* Returns the parts' totals along the main dimension: from the rule, else from the shape of tensor t. */
ckd_status import_totals(uint64_t **out, const import_tensor *t, const layout_rule *rule, size_t part,
                         ckd_error *err);

#endif
