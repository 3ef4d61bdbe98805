/*
 * A lossy tile in the memory of a device. The device makes its statistics, integers and decoded values. The
 * host receives sums, hashes, and the integers at two bits each. The host makes plans, rounds factors and
 * does the entropy coding, as for other tiles. Internal to engine/.
 *
 * This serves tiles as training has them: whole rows, a parent if they are weights, and few exceptions. Other
 * tiles are copied to the host and coded there.
 */
#ifndef ENGINE_LOSSY_DEVICE_H
#define ENGINE_LOSSY_DEVICE_H

#include <pthread.h>

#include "engine/device/reference.h"
#include "engine/lossy/block.h"
#include "engine/lossy/moment_pair.h"
#include "engine/lossy/sums.h"
#include "engine/lossy/low_rank_products.h"

/* A master's block as it will appear in a rounded copy of a narrower dtype. */
typedef struct lossy_device_rounded {
    hash128 original, content;
    lossy_error error;
} lossy_device_rounded;

/* Result for one block. */
typedef struct lossy_device_block {
    uint64_t at, count; /* in the tile */
    hash128 original, content;
    hash128 before; /* f32 only: hash of the parent's values */
    bool any;       /* some integer is not 0 */
    lossy_error error;
    lossy_device_rounded bf16, f16; /* of masters */
} lossy_device_block;

/*
 * Arrays of a tile, or of a panel of it, in the device's memory: input, input as floats, the parent's values,
 * decoded values.
 */
typedef struct lossy_device_arrays {
    const void *input;
    const float *now;
    float *before; /* NULL: no parent */
    float *values;
    void *cast;             /* decoded values in the dtype; NULL if that is f32 */
    const int8_t *integers; /* in host memory; NULL: all are 0 */
    /* In host memory: the exceptions, ascending; q: their bits in the dtype. */
    const device_other *kept;
    uint64_t exception_count;
    uint64_t count;
} lossy_device_arrays;

struct lossy_device {
    device_lease *lease;
    ckd_store *store;
    device_reference *reference; /* the tile's values from the last save, kept on the device; NULL: none */
    uint64_t rows, columns, count;
    ckd_dtype dtype;
    bool master;                   /* rounded copies of it will be recognised by its blocks */
    lossy_device_arrays whole, at; /* at: the arrays of the blocks: the whole tile or a panel */
    float *matrix;                 /* residuals in steps, or products of factors */
    int8_t *few;
    device_kept kept; /* room for exceptions, without limits yet */
    uint8_t *panel;   /* memory for a panel's arrays */
    uint8_t *scratch; /* reused by one operation after the other */
    uint64_t scratch_size;
    struct { /* of a search for factors, in the scratch */
        float *spare, *mix;
        double *scale;
        uint32_t *largest;
    } search;
    bytes integers, panel_integers;         /* int8 each */
    bytes exception_list, panel_exceptions; /* of device_other */
    lossy_device_block *blocks;
    size_t block_count, block_scratch;
    pthread_mutex_t mutex; /* held while the queue is used; blocks are coded in parallel */
};

/* Rounds an array's size up, so that the next array is aligned for any access. */
static inline uint64_t lossy_device_aligned(uint64_t size) {
    return (size + 255) / 256 * 256;
}
/* Takes the next array from the scratch. */
static inline void *lossy_device_take(const struct lossy_device *d, uint64_t *used, uint64_t size) {
    void *at = d->scratch + *used;
    *used += lossy_device_aligned(size);
    return at;
}
ckd_status lossy_device_reaches(const struct lossy_device *d, uint64_t used, ckd_error *err);
static inline ckd_status lossy_device_status(const struct lossy_device *d, const device_failure *why,
                                             ckd_error *err) {
    return device_status(why, d->lease->queue.device, err);
}

/*
 * Tells whether a device can code the tile, which has been cut and has its part, dtype and parameters. input:
 * its address there.
 */
bool lossy_device_may(const lossy_tile *t, const void *input);
/*
 * A tile on a device and its parent's values. At most one of these is set: `before` (on the host),
 * `reference` (kept on the device), makes_before (decoded on the device later).
 */
typedef struct lossy_device_values {
    ckd_store *store;
    device_lease *lease;
    const void *input;
    const float *before;
    device_reference *reference; /* taken by the caller; passes to the tile */
    /* The caller decodes them, then calls lossy_device_before_made before anything else. */
    bool makes_before;
    uint64_t widest; /* largest number of columns of its panels */
    bool master;
    bool only_given; /* only hashes of the input are wanted */
} lossy_device_values;
/*
 * Allocates memory for the tile and converts its elements to floats: sets t->device, t->now and t->before
 * (NULL with only_given). Release with lossy_device_end. Errors: NOMEM (also of the device: the host can code
 * the tile), DEVICE.
 */
ckd_status lossy_device_begin(struct lossy_device *d, lossy_tile *t, const lossy_device_values *values,
                              ckd_error *err);
void lossy_device_end(struct lossy_device *d);
/* Where the caller decodes the parent's values, in the tile's dtype, and memory that is free until then. */
typedef struct lossy_device_scratch {
    void *before, *spare;
    uint64_t size; /* of `spare`: at least 9 bytes per element */
} lossy_device_scratch;
lossy_device_scratch lossy_device_scratch_of(const lossy_tile *t);
/* Called when the parent's values are decoded: converts them to floats where necessary. */
ckd_status lossy_device_before_made(const lossy_tile *t, ckd_error *err);

/*
 * A block of the parent in the tile. It begins at element `at` and has `width` elements in each row of the
 * tile. width = count: it is contiguous.
 */
typedef struct lossy_device_part {
    uint64_t at, width, count;
    hash128 content;
} lossy_device_part;
/*
 * Compares the hashes of the tile's reference with those of the parent's blocks, whose places in the tile
 * `parts` gives.
 */
ckd_status lossy_device_compare(bool *same, const lossy_tile *t, const lossy_device_part *parts, size_t count,
                                ckd_error *err);
/*
 * Keeps the decoded values on the device for the next save, under `key`. With only_given it does nothing.
 * Errors: NOMEM, DEVICE.
 */
ckd_status lossy_device_exceptions(const lossy_tile *t, const device_reference_key *key, ckd_error *err);

/* Device versions of tile_pass_run and lossy_residual, of sample pieces, and of the residual matrix. */
ckd_status lossy_device_pass(tile_pass *p, const lossy_tile *t, ckd_error *err);
ckd_status lossy_device_residual(rate_histogram *h, const lossy_tile *t, ckd_error *err);
/* Copies pieces of `from`, in the device's memory, to `to` on the host, one after the other. */
ckd_status lossy_device_gather(float *to, const lossy_tile *t, const float *from, const device_piece *pieces,
                               uint64_t count, ckd_error *err);
/* Makes the residuals in steps, without factors, as the matrix for the search below. */
ckd_status lossy_device_matrix(const lossy_tile *t, ckd_error *err);

/* ---- low_rank_device.c ---- */
/* The search for factors of a tile's matrix; the context is the tile. It owns the scratch until it ends. */
extern const vectors_elsewhere lossy_device_vectors;
/* Bytes of scratch for `count` vectors of each side. */
uint64_t lossy_device_search_size(uint64_t rows, uint64_t columns, uint64_t count);

/* Puts the plan's steps into the scratch from *used on, without the products of its factors. */
ckd_status lossy_device_steps(device_tile *out, const lossy_tile *t, uint64_t *used, ckd_error *err);
/*
 * Multiplies the plan's factors into d->matrix, with the scratch behind `used`: as integers if the factors
 * are small enough, else as floats. Does nothing without factors.
 */
ckd_status lossy_device_factors(device_tile *tile, const lossy_tile *t, uint64_t used, ckd_error *err);

/* ---- device_code.c ---- */
/*
 * Makes integers and decoded values of the tile, which is prepared. *done = false: the tile does not suit a
 * device.
 */
ckd_status lossy_device_code(bool *done, lossy_tile *t, ckd_error *err);
/*
 * Gathers the arrays of the panel t, which begins at column `first` of the tile. They replace the tile's
 * arrays until the next panel.
 */
ckd_status lossy_device_panel(lossy_tile *t, uint64_t first, ckd_error *err);
/* Does the work of lossy_block with the device's results. */
ckd_status lossy_device_block_encode(lossy_job *j, bytes *payload, const lossy_elements *e,
                                     symbols_workspace *work, ckd_error *err);
/* Copies elements of a block in their dtype to `to`: the input, or the decoded values. Thread-safe. */
ckd_status lossy_device_fetch(void *to, const lossy_tile *t, uint64_t at, uint64_t count, bool decoded,
                              ckd_error *err);
/* Records the sample of second moments, or adds first moments to the sums. Errors: NOMEM, DEVICE. */
ckd_status lossy_device_direction(direction_sums *sums, direction_sample *s, const lossy_tile *t, double eps,
                                  ckd_error *err);

/* ---- device_moments.c ---- */
/* Converts the input and the decoded values of a coded tile to halves (pair_record), for the other moment. */
ckd_status lossy_device_halves(const lossy_tile *t, ckd_error *err);
/* Copies n halves from index `at` on: of the input, followed by those of the decoded values. */
ckd_status lossy_device_get_halves(uint16_t *to, const lossy_tile *t, uint64_t at, uint64_t n,
                                   ckd_error *err);
/* Puts n halves of the other moment, from index `at` on, on the device. */
ckd_status lossy_device_put_halves(const lossy_tile *t, const uint16_t *from, uint64_t at, uint64_t n,
                                   ckd_error *err);
/*
 * Finds the largest updates with the other moment, whose halves are all on the device: sets t->pair.bounds, whose eps
 * are known, and t->pair.decoded. *within = false: an update of the decoded values is too large.
 */
ckd_status lossy_device_updates(bool *within, lossy_tile *t, ckd_error *err);

/* ---- device_blocks.c ---- */
/*
 * lossy_device_add_block adds the next block of the tile or panel; at 0 starts a new list.
 * lossy_device_measure then computes hashes and errors of all blocks.
 */
ckd_status lossy_device_add_block(const lossy_tile *t, uint64_t at, uint64_t count, ckd_error *err);
ckd_status lossy_device_measure(const lossy_tile *t, ckd_error *err);
/* Returns the result for the block at `at`. */
const lossy_device_block *lossy_device_block_of(const lossy_tile *t, uint64_t at);

#endif
