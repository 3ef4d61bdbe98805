/* Saves a tensor in a lossy fidelity, tile by tile. Internal to engine/. */
#ifndef ENGINE_SAVE_LOSSY_H
#define ENGINE_SAVE_LOSSY_H

#include "engine/lossy/lossy.h"
#include "engine/save/save.h"

/* Which part of the state the tensor is, for lossy coding. LOSSY_NONE: it is coded exactly. */
lossy_part save_lossy_part(const ckd_save *save, const record_tensor *tensor);
/* How finely a lossy tensor is coded. */
quant_params save_quant_params_of(const ckd_save *save, const record_tensor *tensor);
ckd_status save_lossy_region(ckd_save *save, const ckd_tensor *tensor, const tensor_context *context,
                             uint64_t elements, ckd_error *err);
/*
 * Returns true if training was resumed from the parent. The original values, which the parent's lossy ones
 * approximate, are then lost.
 */
bool save_is_first_after_resume(const ckd_save *save);
/* The checkpoint against which a tile is coded, and its tensor there; NULL: none. */
typedef struct tile_parent {
    const view *view;
    const view_tensor *tensor;
    bool is_ancestor; /* an older ancestor, as the chain of the save's parent costs too much */
} tile_parent;

typedef struct region_figures {
    measures measures;
    direction_sums direction;
    bool paired; /* both moments are known */
} region_figures;

/* A tile, or its part in a panel, whose blocks are in progress. */
typedef struct tile_part {
    lossy_tile tile;
    struct inflight_tile *inflight;
    region_figures *figures;
    bytes original, now, parent_values; /* a panel's values, gathered */
    uint64_t end;                       /* it is done when this many blocks are written */
} tile_part;

/* Buffers of a tile: input, input as floats, parent in its dtype, parent as floats. */
typedef struct lossy_buffers {
    bytes original, now, stored, parent_values;
} lossy_buffers;

/*
 * A tile, from its preparation until its blocks are written. There are two, so that one is prepared while the blocks
 * of the other are in progress. Large tiles are held one at a time.
 */
typedef struct inflight_tile {
    bool in_use;
    lossy_tile tile;
    lossy_buffers buffers;
    tile_part parts[2];          /* for panels, used in turn; a tile without panels uses the first */
    struct lossy_region *region; /* ends with its last tile */
    moment_stats *second;        /* NULL: none */
    load_budget budget;          /* when its last block was decided */
    uint64_t end;
} inflight_tile;

/* A region in progress: all of the saved region, or a panel of it. */
typedef struct region_part {
    const tensor_context *context;
    const save_panel *panel; /* NULL: all of it */
    region_figures figures;
} region_part;

/*
 * A lossy region in progress. It ends with the last of its tiles. `tensor` is used only during the call that saves
 * it.
 */
typedef struct lossy_region {
    ckd_save *save;
    const ckd_tensor *tensor;
    tensor_context context; /* of the whole region */
    quant_params params;
    save_panels panels; /* empty: the region is not cut */
    region_part *parts;
    size_t count;
    double eps[PAIR_BOUNDS];
    double share;           /* of the tensor's expected cost, which leaves the budget with this region */
    uint64_t number;        /* counts the save's lossy regions */
    uint32_t users;         /* its tiles in progress, and the call that saves it */
    bool reported_fallback; /* a tile on a device was coded on the host, which was reported */
} lossy_region;

/* The rows of a tile that are written as side records. Zero-initialise; release with free(items). */
typedef struct row_records {
    shared_rows *items;
    size_t count, capacity;
} row_records;

#define PAIR_BUFFERS 2 /* one pair of moments may begin while the last one is being coded */

/* Everything that the lossy tensors of a save need. */
typedef struct save_tiles {
    inflight_tile in_flight[2];
    /*
     * The budget by which a tile's parent is chosen. It is that of the last tile that is certainly done when the next
     * one is prepared, so it does not depend on timing. seen_region: the number of that tile's region.
     */
    load_budget budget;
    uint64_t seen_region, regions;
    decoder *loaders; /* one for each thread of the pool */
    uint32_t loader_count;
    bytes *decode_buffers; /* one for each loader */
    tile_scratches statistics;
    lattice_scratch scratch;
    row_records row_records; /* of the tile being pushed */
    moment_stats *spare;     /* unused entries, whose memory is used again */
    uint64_t pairs_held;     /* bytes of moments' values in memory */
    /* memory of moments' values that nobody needs any more, for the next ones */
    bytes pair_buffers[PAIR_BUFFERS];
    struct lossy_device *device; /* memory for a tile on a device; NULL: no such tile so far */
} save_tiles;

/*
 * Sets the values of inflight->tile, a tile of inflight->region, and, if it has a readable parent, the
 * parent's (tile_load.c). They live as long as inflight->buffers. budget: chooses the parent. widest: most columns
 * of a panel; a tile on a device may then stay there (tile.device), if it can be coded there. widest == 0:
 * its values are read to the host. Leave the device with save_tile_leave_device.
 */
ckd_status save_load_tile(tile_parent *from, inflight_tile *inflight, const load_budget *budget,
                          uint64_t widest, ckd_error *err);
void save_tile_leave_device(ckd_save *save, lossy_tile *t);
/*
 * Begins a tile with its input only, to hash its blocks. *begun == false: it is not on a device, or cannot stay
 * there. Errors: as save_load_tile's.
 */
ckd_status save_begin_input(bool *begun, ckd_save *save, lossy_tile *t, const ckd_tensor *tensor,
                            uint64_t widest, ckd_error *err);
/* Reads a tile's values as they are and as floats. Errors: NOMEM, and those of the read function. */
ckd_status save_fetch_tile(ckd_save *save, lossy_buffers *b, lossy_tile *t, const ckd_tensor *tensor,
                           ckd_error *err);

/*
 * Statistics and values of a tile's two moments, which come in either order. The moment that comes second needs them,
 * and so does their weight (moment_stats.c).
 */
struct moment_stats {
    moment_stats *next; /* in its bucket, or in the spare list */
    uint64_t hash;
    const char *weight; /* the name of their weight; in the save's arena */
    uint64_t first, count;
    ckd_region region;
    lossy_scales scales;       /* of second moments; row NULL: none */
    direction_sample sample;   /* of second moments, once they were saved */
    struct file_scratch *file; /* holds `values` instead, if memory has reached its limit */
    /* the values of the moment that came first: as input, then as decoded (lossy/moment_pair.c) */
    bytes values;
    uint64_t end;           /* the values are complete when this many blocks are written */
    lossy_part values_part; /* whose values they are; LOSSY_NONE: no values */
    bool second_came, moment_came, weight_came;
    bool served; /* used in this save */
};
/*
 * Returns the entry for a tile of moments, new if need be. *out == NULL: by its name it belongs to no weight. The
 * save owns it.
 */
ckd_status moment_stats_get(moment_stats **out, ckd_save *save, const lossy_tile *t,
                            const tensor_context *context, ckd_error *err);
/*
 * Called for a prepared tile of moments. The first moment of a pair: its input is kept, and of a tile on a device its
 * decoded values, too. The second one: it gets the first one's values, after waiting for them. A tile on a device is
 * coded already. *within == false: one of its updates is too large, and the host must code it. Errors: NOMEM, DEVICE,
 * and those of save_await.
 */
ckd_status pair_tile(bool *within, ckd_save *save, inflight_tile *inflight, const double eps[PAIR_BOUNDS],
                     ckd_error *err);
/* Releases the values of the first moment of a pair, which nobody needs any more. */
void pair_end(save_tiles *all, moment_stats *k);
/* Keeps the decoded values of a decided block, if it belongs to the first moment of a pair. */
ckd_status pair_record_block(const inflight_tile *inflight, const lossy_tile *t, const block_job *job,
                             ckd_error *err);
/*
 * Called for a tile of moments that is coded exactly. If it comes first, the other moment is coded against it. If it
 * comes second, *update is the largest update that its values give with the decoded other ones (NaN: none).
 */
ckd_status pair_exact(double *update, ckd_save *save, inflight_tile *inflight, const double eps[PAIR_BOUNDS],
                      ckd_error *err);
/* Returns the entry of the weight to which the tensor belongs; NULL: none. */
moment_stats *find_moment_stats(const ckd_save *save, const tile_shape *shape, const tensor_context *context);
/* Called for a tile that is done (k may be NULL). Releases the entry if no later tensor needs it. */
void moment_stats_used(ckd_save *save, moment_stats *k, const tensor_context *context);
/*
 * At the end of a save: moves all entries to the tiles' spare list. Their memory serves the next save; entries that
 * this save did not use are freed.
 */
void moment_stats_end(ckd_save *save);
void moment_stats_free(moment_stats *k);

/*
 * Called before a tensor is coded exactly. Handles a moment whose role is exact while the other moment's is lossy, so
 * that it never becomes a tile. If it comes first, the other moment is coded against its values. If it comes second,
 * the largest update is only measured. Values on a device are read to the host. Does nothing for other tensors.
 */
ckd_status pair_exact_tensor(ckd_save *save, const ckd_tensor *tensor, const tensor_context *context,
                             uint64_t elements, ckd_error *err);

/* ---- measures.c ---- */
/*
 * Adds the values of a tile that is coded exactly after all. Without them, the region's relative error would refer to
 * fewer values.
 */
void figures_add_exact(lossy_region *r, const lossy_tile *t);
/* Adds up the errors of a lossy block. Called in block order. */
ckd_status lossy_record_decided(ckd_save *save, tile_part *part, const block_job *job, ckd_error *err);
/* Adds the largest updates of both moments to the figures, once the second one is coded. */
void pair_add_update(region_figures *f, const lossy_pair *pair, double decoded);

/* ---- cells (grid_blocks.c): blocks of a large matrix that cover some rows of some columns ---- */

/* Returns true if the blocks of different panels share their rows. */
bool grid_shares_rows(const lossy_tile *t);
/*
 * Makes the tile's part in a panel a tile of its own. Its values are gathered in the part's memory; shared factors
 * stay the tile's. Errors: NOMEM.
 */
ckd_status grid_of_panel(tile_part *part, ckd_save *save, const lossy_tile *t, const save_panel *panel,
                         ckd_error *err);
/*
 * Sets job->output.rows, the shared rows of a block of a panel. If no block has them yet, they are written before this
 * one. The slot's region job has the panel's tile.
 */
ckd_status grid_rows(block_job *job, save_slot *slot, const lossy_region *r, const save_panel *panel,
                     ckd_error *err);
/* A part of a matrix that several blocks share. */
typedef struct shared_part {
    const lattice_columns *factors;
    const record_tensor *tensor;
    region_span span; /* of the matrix */
} shared_part;
/* Makes a side record of the part, to be written before a block. *content: its hash. Errors: NOMEM. */
ckd_status grid_side_record(hash128 *content, ckd_save *save, save_append *to, const shared_part *part,
                            ckd_error *err);

/*
 * Ends the lossy tiles in progress; the workspace keeps their memory. Called when nobody works on the save any more.
 */
void save_lossy_free(ckd_save *save);

/* ---- tile_memory.c: how tiles are cut, and their memory ---- */
/*
 * Returns the optimizer's eps, or the usual one, and the low eps. Adam corrects its moments for bias: at step t their
 * updates are those of eps * sqrt(1 - beta2^t). An unknown step counts as the first one.
 */
void save_eps_of(double eps[PAIR_BOUNDS], const ckd_tensor *tensor);
/*
 * The most elements of a tile: the same for all tensors of a save, so that tiles of a weight and of its moments
 * match.
 */
uint64_t save_tile_elements(const ckd_save *save);
/*
 * Cuts the tile that begins at element `first` of a region of `elements`. It has no parameters yet. The save has
 * tiles.
 */
lossy_tile save_cut_tile(ckd_save *save, const tensor_context *context, uint64_t elements, uint64_t first);
/* Gives the save its tiles, unless it has them. Errors: NOMEM, and those of save_flush. */
ckd_status save_begin_tiles(ckd_save *save, ckd_error *err);
/* Makes the workspace's tiles. threads: of the pool. Errors: NOMEM; they may then be incomplete. */
ckd_status save_tiles_new(save_workspace *workspace, uint32_t threads, ckd_error *err);
/* Frees the buffers of a tile that is done. */
void inflight_tile_free(inflight_tile *inflight);
/* Accepts NULL. */
void save_tiles_free(save_tiles *all);
/*
 * At the end of a save: frees scratch of more than `max` bytes. The factors of a large matrix may be as large as its
 * values.
 */
void save_tiles_trim(save_tiles *all, uint64_t max);

/* ---- parent.c: the parent's values of a tile ---- */
/* The tile, and the parent whose values it needs. */
typedef struct parent_request {
    ckd_save *save;
    const lossy_tile *tile;
    const tile_parent *from;
    const tensor_context *context;
} parent_request;
/*
 * Loads the parent's values as floats, into the buffers or context->decoded_values. *out == NULL: there is no parent,
 * or it cannot be read, which does not fail the save. Errors: NOMEM, CANCELLED.
 */
ckd_status save_parent_load(const float **out, const parent_request *request, lossy_buffers *b,
                            ckd_error *err);
/* Returns true if the values should be in the host's memory already. */
bool save_parent_in_memory(const tile_parent *from, const tensor_context *context);
/* The result of an attempt to decode the parent on the tile's device. */
typedef struct parent_attempt {
    ckd_status status;
    bool mismatch; /* the result is not what was saved: the data is damaged, or the device computes wrongly */
    ckd_error why;
} parent_attempt;
/*
 * Decodes the parent's chains in the memory of the tile's device, which has been told so
 * (lossy_device_values.makes_parent_values). false: the host must decode it, and reports what is wrong, if anything is.
 */
bool save_parent_decode_on_device(parent_attempt *out, ckd_save *save, const lossy_tile *t,
                                  const tile_parent *from, const tensor_context *context);
/*
 * Reports that the host had to decode what the device could not. The host also decodes all later parents of this
 * save.
 */
void save_parent_report(ckd_save *save, const parent_attempt *a, const tensor_context *context);

/* ---- reference.c: values of a tile that its device caches for the next save ---- */
struct device_reference_key save_reference_key(const lossy_tile *t, const tensor_context *context);
/* Sets *same if the cached values (lossy_device_values.reference) are those of the parent. */
ckd_status save_reference_compare(bool *same, const lossy_tile *t, const tile_parent *from,
                                  const tensor_context *context, ckd_error *err);
/* Caches the decoded values of the tile. A failure only costs the next save time. */
void save_reference_keep(ckd_save *save, const lossy_tile *t, const tensor_context *context);

#endif
