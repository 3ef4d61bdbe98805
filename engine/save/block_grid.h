/*
 * The cuts of a region: into panels, which are some of its columns, and these into blocks (block_grid.c).
 * Internal to engine/.
 */
#ifndef ENGINE_SAVE_BLOCK_GRID_H
#define ENGINE_SAVE_BLOCK_GRID_H

#include "engine/encode/encode.h"

struct save_registry;

/* Sides of blocks, in elements. */
typedef struct block_sides {
    uint64_t max, min;
    uint64_t target; /* least average length of a side: small blocks cost bytes and time */
} block_sides;
/* Which lossy matrices are cut, and how. */
typedef struct save_grid {
    block_sides row_sides, column_sides;
    /* least elements and columns of a matrix that is cut, or of each matrix of a stack */
    uint64_t elements, columns;
} save_grid;

/* The grid that ckd_save_begin sets. */
save_grid save_default_grid(void);
/* Sides of the blocks of exact matrices. */
block_sides save_exact_sides(const ckd_save *save);
/* The most elements of an exact block, for tensors that are not cut into panels. */
uint64_t save_block_elements(const ckd_save *save, const ckd_tensor *tensor);
/*
 * Returns true if a region of `elements` is saved in panels of columns. save_is_cut: for exact regions;
 * save_is_cut_lossy: for lossy ones.
 */
bool save_is_cut(const ckd_save *save, const ckd_tensor *tensor, const tensor_context *t, uint64_t elements);
/* Records a tensor that is not cut. If it is a large master, its rounded copies are not cut either. Errors: NOMEM. */
ckd_status save_record_whole(struct save_registry *registry, const tensor_context *t, uint64_t elements,
                             ckd_error *err);
bool save_is_cut_lossy(const ckd_save *save, const tensor_context *t, uint64_t elements);
/* The ends of a panel's blocks. */
typedef struct save_places save_places;
typedef struct save_panel_rows {
    const view_shard *parent; /* the parent's shard, whose block ends are used; NULL: `places` has them */
    const save_places *places;
    uint64_t first, width; /* first row in the tensor, or in each matrix of a stack; columns of the panel */
    uint64_t stacked;      /* rows of each matrix of the stack; 0: no stack */
    uint64_t max;          /* most rows of a block, so that no block of the widest panel is too large */
} save_panel_rows;
/* Elements of the block that begins at element `first` of the panel, unless the panel ends before. */
uint64_t save_panel_block(const save_panel_rows *rows, uint64_t first);
/* Some columns of a region, as a region of their own. */
typedef struct save_panel {
    tensor_context context; /* its region is in the save's arena; context.rows points to `rows` below */
    save_panel_rows rows;
    uint64_t first; /* first column, and the number of columns of the whole region */
    uint64_t columns;
    uint64_t next; /* first element that is not saved yet (panels.c) */
} save_panel;
typedef struct save_panels {
    save_panel *items;
    size_t count;
    save_places *places; /* of rows */
} save_panels;
/*
 * Cuts a region into panels, from the first column to the last. Release with save_panels_free, whatever the status.
 * Errors: NOMEM.
 */
ckd_status save_cut(save_panels *out, ckd_save *save, const tensor_context *t, const block_sides *row_sides,
                    const block_sides *column_sides, ckd_error *err);
void save_panels_free(save_panels *p);

/* ---- panels.c ---- */
/* Saves elements first ... end - 1 of a panel exactly. tensor: has the values of the whole region. */
ckd_status save_exact_panel(ckd_save *save, const ckd_tensor *tensor, const save_panel *panel, uint64_t first,
                            uint64_t end, ckd_error *err);
/* Bytes of a tensor's rows that are held while its panels are saved, for this staging limit. */
uint64_t save_held_bytes(uint64_t staging);
ckd_status save_in_panels(ckd_save *save, const ckd_tensor *tensor, const tensor_context *t, ckd_error *err);

#endif
