/* Saving a tensor in a lossy fidelity: tile by tile. Internal to engine/. */
#ifndef ENGINE_SAVE_LOSSY_H
#define ENGINE_SAVE_LOSSY_H

#include "engine/lossy/direction.h"
#include "engine/save/save.h"

/* How the tensor is coded in this save; LOSSY_NONE: exactly. */
lossy_part save_lossy_part(const ckd_save *save, const record_tensor *tensor);
/* How finely it is coded then. */
quant_params save_quant_params_of(const ckd_save *save, const record_tensor *tensor);
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

typedef struct region_figures {
    measures measures;
    direction_sums direction;
    bool paired; /* both moments are known */
} region_figures;

/* A tile, or a panel's part in it, whose blocks are under way. */
typedef struct tile_part {
    lossy_tile tile;
    struct inflight_tile *held;
    region_figures *figures;
    bytes original, now, before; /* of a panel, gathered */
    uint64_t end;                /* it is through when so many blocks are written */
} tile_part;

/* A tile of a lossy tensor: as given, as floats, and what the parent has, in its dtype and as floats. */
typedef struct lossy_buffers {
    bytes original, now, stored, before;
} lossy_buffers;

/*
 * A tile, from its preparation until its blocks are written. There are two, so that one is prepared while the blocks of the other are under
 * way; if they are large, one.
 */
typedef struct inflight_tile {
    bool in_use;
    lossy_tile tile;
    lossy_buffers buffers;
    tile_part parts[2];          /* of panels, in turn; of a tile that has none, the first */
    struct lossy_region *region; /* which ends with its last tile */
    moment_stats *second;        /* NULL: none */
    load_budget seen;            /* when its last block was decided on */
    uint64_t end;
} inflight_tile;

/* Rows of a tile, in side records, as blocks need them; zero-initialise, and release with free(items). */
typedef struct row_records {
    shared_rows *items;
    size_t count, capacity;
} row_records;

#define PAIR_BUFFERS 2 /* one pair may begin while the last one is being coded */

/* What lossy tensors need, all of a save. */
typedef struct save_tiles {
    inflight_tile held[2];
    /*
     * Of the last tile that is through for certain when another one is prepared, which does not depend on how fast anybody is: by this budget its
     * parent is chosen. region: that had it, by its number.
     */
    load_budget seen;
    uint64_t seen_region, regions;
    decoder *loaders; /* one for each thread of the pool */
    uint32_t loader_count;
    bytes *rooms; /* as many */
    tile_scratches statistics;
    lattice_scratch scratch;
    row_records row_records; /* of the tile that is pushed */
    moment_stats *spare;     /* that belong to nothing: their memory is used again */
    uint64_t pairs_held;     /* bytes of moments' values in memory */
    bytes pair_buffers
        [PAIR_BUFFERS]; /* where moments' values were that nobody needs any more, for the next ones */
    struct lossy_device *device; /* room for what a tile on a device takes; NULL: none was there yet */
} save_tiles;

/*
 * Sets the tile's values and, if it has a parent that can be read, what is known of it. They live as long as the buffers
 * (tile.c). budget: for choosing it. widest: columns of a panel of it at most; 0: what lies on a device is read, else it may stay there (t->device),
 * if such a tile can be coded there: save_tile_leave_device.
 */
ckd_status save_load_tile(tile_parent *from, ckd_save *save, lossy_buffers *buffers, lossy_tile *t,
                          const load_budget *budget, const ckd_tensor *tensor, const tensor_context *context,
                          uint64_t widest, ckd_error *err);
void save_tile_leave_device(ckd_save *save, lossy_tile *t);
/* The tile as it was given, for its blocks' hashes alone. false in *begun: it is not on a device, or not such as may stay there. Errors: as save_load_tile's. */
ckd_status save_begin_given(bool *begun, ckd_save *save, lossy_tile *t, const ckd_tensor *tensor,
                            uint64_t widest, ckd_error *err);
/* Fetches a tile's values as they are given, and as floats. Errors: NOMEM, and those of the read function. */
ckd_status save_fetch_tile(ckd_save *save, lossy_buffers *b, lossy_tile *t, const ckd_tensor *tensor,
                           ckd_error *err);
/* Of a lossy block, in order: its errors are added up. */
ckd_status lossy_record_decided(ckd_save *save, tile_part *of, const block_job *job, ckd_error *err);

/* Of a tile's second and first moments, in either order, what those that come after them need, and their weights (moment_stats.c). */
struct moment_stats {
    moment_stats *next;
    const char *weight; /* the name of what they belong to; in the save's arena */
    uint64_t first, count;
    ckd_region region;
    lossy_scales scales;       /* of second moments; row NULL: none */
    direction_sample sample;   /* of second moments, once they came */
    struct file_scratch *file; /* has `values` instead, if memory has as much as it may */
    bytes
        values; /* of the moments that came first, for the others: as given, as decoded (lossy/moment_pair.h) */
    uint64_t end;    /* these are there when so many blocks are written */
    lossy_part held; /* whose values; LOSSY_NONE: nobody's */
    bool second_came, moment_came, weight_came;
    bool served; /* in this save */
};
/* What is kept, for moments; *out: NULL if they belong to nothing by their name. It is the save's. */
ckd_status moment_stats_get(moment_stats **out, ckd_save *save, const lossy_tile *t,
                            const tensor_context *context, ckd_error *err);
/*
 * A tile of moments that is prepared: if it is the first of the two, what was given is kept; if it is the last one, it gets the other one's values, which are waited for.
 * Errors: NOMEM, and those of save_await.
 */
ckd_status pair_tile(ckd_save *save, inflight_tile *held, const double eps[PAIR_BOUNDS], ckd_error *err);
/* Nobody needs what is kept of the first one any more. */
void pair_end(save_tiles *all, moment_stats *k);
/* A block that is decided on: what a decoder gets of the first of the two moments is kept. */
ckd_status pair_record_block(const inflight_tile *held, const lossy_tile *t, const block_job *job,
                             ckd_error *err);
/* Of moments that stay as they are, all of the tile: the others are held against them, or *update is what a decoder gets with the others (NaN: there are none). */
ckd_status pair_exact(double *update, ckd_save *save, inflight_tile *held, const double eps[PAIR_BOUNDS],
                      ckd_error *err);
/*
 * Before a tensor is coded exactly. A moment whose role is exact, while the other one's is lossy, never becomes a tile; its values count for the other
 * one all the same, if it comes first. If it comes last, the largest update is only measured. Does nothing for other tensors, nor for values on a device.
 */
ckd_status pair_exact_tensor(ckd_save *save, const ckd_tensor *tensor, const tensor_context *context,
                             uint64_t elements, ckd_error *err);
/* Of both moments, when the last of the two is coded. */
void pair_add_update(region_figures *f, const lossy_pair *pair, double decoded);
/* Those that belong to what is now saved; NULL if there are none. */
moment_stats *find_moment_stats(const ckd_save *save, const lossy_tile *t, const tensor_context *context);
/* By a tile that is done (k may be NULL): those that nobody will ask for any more are released. */
void moment_stats_used(ckd_save *save, moment_stats *k, const tensor_context *context);
/* At a save's end: all are the tiles', for the next save, which may have what this one had. */
void moment_stats_end(ckd_save *save);
void moment_stats_free(moment_stats *k);

/* ---- cells (grid_blocks.c): blocks of a large matrix that are some rows of some columns ---- */

/* Is it worth anything to the blocks of one panel to share their rows with those of others? */
bool grid_shares_rows(const lossy_tile *t);
/*
 * The tile's part that lies in a panel, a tile by itself: its values are gathered in the part's memory; what it shares with the tile is the tile's.
 * Errors: NOMEM.
 */
ckd_status grid_of_panel(tile_part *of, ckd_save *save, const lossy_tile *t, const save_panel *panel,
                         ckd_error *err);
/* Those of the tile of a region that a block of `count` elements has, which begins at element `at` of the panel's tile; if nobody has them yet, they come before it. */
ckd_status grid_rows(shared_rows *out, row_records *known, save_append *before, ckd_save *save,
                     const lossy_tile *panel, uint64_t at, uint64_t count, const tensor_context *whole,
                     uint64_t columns, ckd_error *err);
/* Side record, to come before a block: the part of a matrix that several blocks share. Errors: NOMEM. */
ckd_status grid_side_record(hash128 *content, ckd_save *save, save_append *to, const lattice_columns *shared,
                            const tensor_context *context, const span *of, ckd_error *err);

/* Ends what of lossy tensors is under way; nobody is at work on the save. Its tiles stay with the workspace. */
void save_lossy_free(ckd_save *save);

/* ---- tiles.c: how they are cut, and their memory ---- */
/*
 * The optimizer's eps, or the usual one; and the low one. Adam corrects its moments for bias: at step t they make the updates of eps * sqrt(1 - beta2^t). If the
 * step is not known, it counts as the first one.
 */
void save_eps_of(double eps[PAIR_BOUNDS], const ckd_tensor *tensor);
/* At most, of one tile: the same for all tensors of a save, so that tiles of a weight and of its moments match. */
uint64_t save_tile_elements(const ckd_save *save);
/* The tile of a region of `elements` that begins at element `first`; it has no recipe yet. The save has tiles. */
lossy_tile save_cut_tile(ckd_save *save, const tensor_context *context, uint64_t elements, uint64_t first);
/* Gives the save its tiles, unless it has them. Errors: NOMEM, and those of save_flush. */
ckd_status save_begin_tiles(ckd_save *save, ckd_error *err);
/* The workspace's. threads: of the pool. Errors: NOMEM; then it has some of them. */
ckd_status save_tiles_new(save_workspace *workspace, uint32_t threads, ckd_error *err);
/* Of a tile that is through. */
void inflight_tile_free(inflight_tile *held);
/* Accepts NULL. */
void save_tiles_free(save_tiles *all);
/* At a save's end: what each part of a tile takes beside its values is kept if it is at most so many bytes; components of a large matrix may be as much as its values. */
void save_tiles_give_back(save_tiles *all, uint64_t max);

/* ---- parent.c: what the parent has of a tile ---- */
/* As floats on the host, in the buffers or where the region's values are kept; NULL: there is nothing, or it cannot be read, which does not cost the new state. Errors: NOMEM, CANCELLED. */
ckd_status save_parent_load(const float **out, const tile_parent *from, ckd_save *save, lossy_buffers *b,
                            const lossy_tile *t, const tensor_context *context, ckd_error *err);
/* Does it lie in the host's memory already, as far as is known? */
bool save_parent_at_hand(const tile_parent *from, const tensor_context *context);
/* What came of an attempt to make it on the tile's device. */
typedef struct parent_attempt {
    ckd_status status;
    bool bad; /* what came out is not what was saved: that is damaged, or the device computes wrongly */
    ckd_error why;
} parent_attempt;
/*
 * Makes it from blocks' chains where the tile's device, which was told so (lossy_device_values.makes_before), has room for it. false: the host has to decode it, which says
 * what is wrong, if anything is.
 */
bool save_parent_make(parent_attempt *out, ckd_save *save, const lossy_tile *t, const tile_parent *from,
                      const tensor_context *context);
/* The host could decode what the device could not: that is told, and the rest of the save's parents are the host's. */
void save_parent_report(ckd_save *save, const parent_attempt *a, const tensor_context *context);

/* ---- reference.c: what is kept of a tile on its device, for the next save ---- */
struct device_reference_key save_reference_key(const lossy_tile *t, const tensor_context *context);
/* Are the values that the tile has for its parent's (lossy_device_values.reference) those of the parent? */
ckd_status save_reference_compare(bool *same, const lossy_tile *t, const tile_parent *from,
                                  const tensor_context *context, ckd_error *err);
/* Keeps what a decoder will get of the tile. What fails costs the next save time. */
void save_reference_keep(ckd_save *save, const lossy_tile *t, const tensor_context *context);

#endif
