/* Saving a tensor in a lossy fidelity: tile by tile. Internal to engine/. */
#ifndef ENGINE_SAVE_LOSSY_H
#define ENGINE_SAVE_LOSSY_H

#include "engine/lossy_direction.h"
#include "engine/save.h"

/* How the tensor is coded in this save; LOSSY_NONE: exactly. */
lossy_part save_lossy_part(const ckd_save *save, const record_tensor *tensor);
ckd_status save_lossy_region(ckd_save *save, const ckd_tensor *tensor, const tensor_context *context,
                             uint64_t elements, ckd_error *err);
/* Was the training resumed from the parent, so that what the parent's values stand for is gone? */
bool save_is_first_after_resume(const ckd_save *save);
/* The checkpoint that a tile is coded against, and its tensor there; NULL: none. */
typedef struct tile_parent {
    const view *view;
    const view_tensor *tensor;
    bool is_ancestor; /* not the save's parent, whose chain costs too much */
} tile_parent;
/*
 * Sets the tile's values and, if it has a parent that can be read, what is known of it. They live until the next tile
 * (save_tile.c). widest: columns of a panel of it at most; 0: what lies on a device is read, else it may stay there (t->device), if such a tile can be
 * coded there: save_tile_leave_device.
 */
ckd_status save_load_tile(tile_parent *from, ckd_save *save, lossy_tile *t, const ckd_tensor *tensor,
                          const tensor_context *context, uint64_t widest, ckd_error *err);
void save_tile_leave_device(ckd_save *save, lossy_tile *t);

/* Second moments of a tile, for the weights and first moments that come after them (save_second.c). */
struct kept_second {
    kept_second *next;
    const char *weight; /* the name of what they belong to; in the save's arena */
    uint64_t first;
    ckd_region region;
    lossy_scales scales; /* row NULL: none */
    direction_sample sample;
    bool moment_came, weight_came;
};
/* *out: NULL if they belong to nothing by their name. It is the save's. */
ckd_status keep_second(kept_second **out, ckd_save *save, const lossy_tile *t, const tensor_context *context,
                       ckd_error *err);
/* Those that belong to what is now saved; NULL if there are none. */
kept_second *find_second(const ckd_save *save, const lossy_tile *t, const tensor_context *context);
/* By a tile that is done (k may be NULL): those that nobody will ask for any more are released. */
void second_was_used(ckd_save *save, kept_second *k, const tensor_context *context);
void kept_seconds_free(kept_second *k);

/* ---- cells (save_cells.c): blocks of a large matrix that are some rows of some columns ---- */

/* Rows of a tile, in side records, as blocks need them; zero-initialise, and release with free(items). */
typedef struct known_rows {
    shared_rows *items;
    size_t count;
} known_rows;
/* Is it worth anything to the blocks of one panel to share their rows with those of others? */
bool cells_share_rows(const lossy_tile *t);
/*
 * The tile's part that lies in a panel, a tile by itself: its values, gathered, live until the next one; what it shares with the tile is the tile's.
 * Errors: NOMEM.
 */
ckd_status cells_of_panel(lossy_tile *out, ckd_save *save, const lossy_tile *t, const save_panel *panel,
                          ckd_error *err);
/* Those of the tile of a region that a block of `count` elements has, which begins at element `at` of the panel's tile; written, if they are not yet. */
ckd_status cells_rows(shared_rows *out, known_rows *known, ckd_save *save, const lossy_tile *panel,
                      uint64_t at, uint64_t count, const tensor_context *whole, uint64_t columns,
                      ckd_error *err);
/* Side record: the part of a matrix that several blocks share. Errors: those of chunk_writer_append. */
ckd_status save_side(hash128 *content, ckd_save *save, const lattice_columns *shared,
                     const tensor_context *context, const span *of, ckd_error *err);

/* Releases what lossy tensors needed. */
void save_lossy_free(ckd_save *save);

#endif
