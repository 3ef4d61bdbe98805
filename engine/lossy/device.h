/*
 * A lossy tile that lies in the memory of a device: statistics, integers and the values they stand for are made there, and what comes to the host are sums,
 * hashes, and the integers in two bits each. Plans, factors' rounding and entropy coding are the host's, as for other tiles. Internal to engine/.
 *
 * For tiles as training has them: whole rows, and a parent, if it is weights; with few elements that have to be kept as they are. Others are read to the host, and coded there.
 */
#ifndef ENGINE_LOSSY_DEVICE_H
#define ENGINE_LOSSY_DEVICE_H

#include <pthread.h>

#include "engine/device/reference.h"
#include "engine/lossy/block.h"
#include "engine/lossy/direction.h"
#include "engine/lossy/sums.h"
#include "engine/lossy/low_rank_products.h"

/* A master's block as a copy in a narrower dtype will have it. */
typedef struct lossy_device_rounded {
    hash128 original, content;
    lossy_error error;
} lossy_device_rounded;

/* What was made of one block. */
typedef struct lossy_device_block {
    uint64_t at, count; /* in the tile */
    hash128 original, content;
    hash128 before; /* of f32: of the parent's values */
    bool any;       /* is one of its integers not 0? */
    lossy_error error;
    lossy_device_rounded bf16, f16; /* of masters */
} lossy_device_block;

/* Arrays of a tile in the device's memory, or of a panel of it: as given, as floats, the parent's, and what a decoder will get. */
typedef struct lossy_device_arrays {
    const void *input;
    const float *now;
    float *before; /* NULL: no parent */
    float *values;
    void *cast;             /* values in the dtype, if that is not f32 */
    const int8_t *integers; /* on the host; NULL: all are 0 */
    /* On the host: elements that are kept as they are, in order; q: their bits, in the dtype. */
    const device_other *kept;
    uint64_t exception_count;
    uint64_t count;
} lossy_device_arrays;

struct lossy_device {
    device_lease *lease;
    ckd_store *store;
    device_reference *reference; /* what is kept of the tile from save to save; NULL: nothing */
    uint64_t rows, columns, count;
    ckd_dtype dtype;
    bool master;                   /* copies that are rounded from it will be known by its blocks */
    lossy_device_arrays whole, at; /* at: whose blocks these are: the whole tile, or a panel */
    float *matrix;                 /* what integers have to say, or products of factors */
    int8_t *few;
    device_kept kept; /* room for what is kept as it is; with no limits yet */
    uint8_t *panel;   /* room for a panel's arrays */
    uint8_t *scratch; /* for one operation after the other */
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
    pthread_mutex_t mutex; /* whoever uses the queue while blocks are coded */
};

/* Sizes of arrays, so that the next one begins where any access is fast. */
static inline uint64_t lossy_device_aligned(uint64_t size) {
    return (size + 255) / 256 * 256;
}
/* Places in the scratch, one after the other. */
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

/* Can the tile, which is cut and has its part, dtype and recipe, be coded on a device? given: where it is there. */
bool lossy_device_may(const lossy_tile *t, const void *input);
/* A tile where it is on a device, and what it is to be compared with: at most one of the parent's values, on the host; what is kept of them there; and that they will be made there. */
typedef struct lossy_device_values {
    ckd_store *store;
    device_lease *lease;
    const void *input;
    const float *before;
    device_reference *reference; /* taken; the tile's from now on */
    bool makes_before;           /* before anything else is done with the tile: lossy_device_before_made */
    uint64_t widest;             /* columns of its panels, at most */
    bool master;
    bool only_given; /* nothing will be made of it but its blocks' hashes, as it was given */
} lossy_device_values;
/*
 * Memory for the tile, and its elements as floats: t->device and t->now are set (t->now NULL: only_given). Release with lossy_device_end. Errors: NOMEM (also of the
 * device: the host can do it), DEVICE.
 */
ckd_status lossy_device_begin(struct lossy_device *d, lossy_tile *t, const lossy_device_values *values,
                              ckd_error *err);
void lossy_device_end(struct lossy_device *d);
/* Of the device's memory: where the parent's values are made, in the tile's dtype, and what is not used until then. */
typedef struct lossy_device_scratch {
    void *before, *spare;
    uint64_t size; /* of what is spare: at least 9 bytes an element */
} lossy_device_scratch;
lossy_device_scratch lossy_device_scratch_of(const lossy_tile *t);
/* They are there. */
ckd_status lossy_device_before_made(const lossy_tile *t, ckd_error *err);

/* A block of the parent's in the tile: from element `at` on, so many in each row of the tile that it has (width), or (width = count) all behind each other. */
typedef struct lossy_device_part {
    uint64_t at, width, count;
    hash128 content;
} lossy_device_part;
/* Are the tile's values before those of the parent, whose blocks in the tile these are? */
ckd_status lossy_device_compare(bool *same, const lossy_tile *t, const lossy_device_part *parts, size_t count,
                                ckd_error *err);
/* What a decoder will get is kept for the next save; of only_given, nothing. key: of the tile. Errors: NOMEM, DEVICE. */
ckd_status lossy_device_exceptions(const lossy_tile *t, const device_reference_key *key, ckd_error *err);

/* tile_pass_run, lossy_residual, a sample's elements, products with what integers have to say: of a tile on a device. */
ckd_status lossy_device_pass(tile_pass *p, const lossy_tile *t, ckd_error *err);
ckd_status lossy_device_residual(rate_histogram *h, const lossy_tile *t, ckd_error *err);
/* from: in the device's memory, as the pieces count; to: all pieces, one after the other, on the host. */
ckd_status lossy_device_gather(float *to, const lossy_tile *t, const float *from, const device_piece *pieces,
                               uint64_t count, ckd_error *err);
/* What integers have to say of each element, without factors, as the matrix that the search below multiplies with. */
ckd_status lossy_device_matrix(const lossy_tile *t, ckd_error *err);

/* ---- low_rank_device.c ---- */
/* The search for factors of a tile's matrix (the context), in the scratch, which is nobody else's until it ends. */
extern const vectors_elsewhere lossy_device_vectors;
/* Bytes of scratch for `count` vectors of each side. */
uint64_t lossy_device_search_size(uint64_t rows, uint64_t columns, uint64_t count);

/* The plan's steps, in the scratch from *used on; without the products of its factors. */
ckd_status lossy_device_steps(device_tile *out, const lossy_tile *t, uint64_t *used, ckd_error *err);
/* These, in d->matrix, with the scratch behind `used`: integers, if the factors are small enough, else floats. Nothing, if it has none. */
ckd_status lossy_device_factors(device_tile *tile, const lossy_tile *t, uint64_t used, ckd_error *err);

/* ---- device_code.c ---- */
/* Makes integers and values of the tile, which is prepared. false in *done: it is none for a device. */
ckd_status lossy_device_code(bool *done, lossy_tile *t, ckd_error *err);
/* The panel of the tile that t is to be, from column `first` of it on: its arrays, gathered, take the tile's place until the next one. */
ckd_status lossy_device_panel(lossy_tile *t, uint64_t first, ckd_error *err);
/* lossy_block, from that. */
ckd_status lossy_device_block_encode(lossy_job *j, bytes *payload, const lossy_tile *t, uint64_t at,
                                     uint64_t count, symbols_workspace *work, ckd_error *err);
/* Elements of a block in their dtype, into `to`: as given, or as a decoder will get them. Thread-safe. */
ckd_status lossy_device_fetch(void *to, const lossy_tile *t, uint64_t at, uint64_t count, bool decoded,
                              ckd_error *err);
/* Of second moments: notes the sample. Of first ones: adds to the sums. Errors: NOMEM, DEVICE. */
ckd_status lossy_device_direction(direction_sums *sums, direction_sample *s, const lossy_tile *t, double eps,
                                  ckd_error *err);

/* ---- device_blocks.c ---- */
/* The next block of the tile or panel (at 0: the first one); and once all are told, their hashes and errors. */
ckd_status lossy_device_add_block(const lossy_tile *t, uint64_t at, uint64_t count, ckd_error *err);
ckd_status lossy_device_measure(const lossy_tile *t, ckd_error *err);
/* What was made of the block at `at`. */
const lossy_device_block *lossy_device_block_of(const lossy_tile *t, uint64_t at);

#endif
