/*
 * Arithmetic on tensors that lie in the memory of a device: one table of functions a backend. The table of kernels/kernels.h says what each
 * operation means; this one says it for many elements at a time, in memory that the host cannot read, and in the order of a queue. The one backend
 * is CUDA, a shared object of its own (libckptdelta_cuda.so), which is opened when a device is first asked for.
 *
 * Everything on a queue happens in the order given, behind what the caller's stream had before, and not yet when the call returns: buffers stay as
 * they are until device_backend.finish says so. No call waits for a whole device, uses a default stream, allocates (but for `allocate` and
 * `allocate_pinned`), or changes the calling thread's current device. Thread-safe, as long as each queue has one thread at a time.
 *
 * Nothing here ends the process, whatever the device does: a call that fails says which one, and why.
 */
#ifndef KERNELS_DEVICE_H
#define KERNELS_DEVICE_H

#include "kernels/device_symbols.h"
#include "kernels/kernels.h"

/*
 * A tensor of at most so many bytes is read, all of it, and is the host's from then on: a launch and a wait take longer than the bus does. It is no more than what is looked at as a whole
 * to see how it is best coded (block_probe_of).
 */
#define DEVICE_SMALL (UINT64_C(64) << 10)

#ifdef __cplusplus
extern "C" {
#endif

#define DEVICE_VERSION 9

typedef enum device_result {
    DEVICE_DONE,
    DEVICE_ABSENT, /* no driver, or no such device */
    DEVICE_FULL,   /* out of the device's memory, or of memory that can be pinned */
    DEVICE_FAILED  /* anything else: what was on the device may be lost */
} device_result;

typedef struct device_failure {
    device_result result;
    char call[48];    /* "cudaMalloc" */
    char reason[160]; /* as the backend's library says it */
} device_failure;

typedef struct device_about {
    char name[96];
    uint64_t memory, memory_free; /* bytes */
    uint32_t processors;
    uint32_t major, minor; /* compute capability */
} device_about;

/* A stream of a device, and what products on it need. stream: as the backend's library has it (cudaStream_t). */
typedef struct device_queue {
    int device;
    void *stream, *products, *finished; /* the latter two are the backend's own */
} device_queue;

/* ---- operations on elements ---- */

/* Spans of a call at most: many small tensors take one launch. */
#define DEVICE_SPANS 32

/* to may be from. Addresses are multiples of the element's size; of 16 bytes is faster. */
typedef struct device_span {
    void *to;
    const void *from, *first, *second; /* as the operation says; NULL where it has none */
    uint64_t n;                        /* elements */
} device_span;

typedef enum device_operation {
    DEVICE_COPY,     /* bytes as they are; dtype: CKD_U8 */
    DEVICE_RESIDUAL, /* kernels.ordered_residual: to = from - first */
    DEVICE_APPLY,    /* kernels.ordered_apply: to = from + first */
    DEVICE_ROTATE,   /* kernels.rotate_sign */
    DEVICE_UNROTATE, /* kernels.unrotate_sign */
    DEVICE_CONTEXT,  /* kernels.magnitude_context: a byte each */
    DEVICE_CAST,     /* kernels.cast: f32 to bf16 or f16 (`to_dtype`), f64 to f32 */
    DEVICE_WIDEN,    /* kernels.widen: f16, bf16 or f32 to f32; i8, too: integers as floats */
    DEVICE_STEP /* kernels.optimizer_step: of f32; from: the values before, first and second: the rule's inputs */
} device_operation;

/* What all spans of a call have in common. */
typedef struct device_elements {
    device_operation operation;
    ckd_dtype dtype, to_dtype; /* to_dtype: of DEVICE_CAST */
    const step_rule *rule;     /* of DEVICE_STEP */
} device_elements;

/* XXH3-64 of each 4 KiB of `bytes` bytes, of what is left at the end as well, into `to`. values: any address; multiples of 8 are fastest. */
typedef struct device_pieces {
    const void *values;
    uint64_t bytes;
    uint64_t *to;
} device_pieces;
#define DEVICE_HASH_PAGE 4096u

/* ---- operations on lossy tiles ---- */

/* What the integers of a tile say of how they came about; in the device's memory, zero before the first call. */
typedef struct device_level_sums {
    int64_t below[3];  /* by how much |residual| was below |q|, for |q| = 1, 2, more; in units of 2^-30 */
    uint64_t count[3]; /* how often */
    uint64_t
        misfits; /* integers that do not fit a byte, and are not kept: `few` is of no use if there are any */
} device_level_sums;

/* An element of a tile that stands in a list. */
typedef struct device_other {
    uint32_t at;
    int32_t q;
} device_other;

/*
 * Elements of a tile that are kept as they are: those beyond the limits, infinite, NaN, or (of second moments) negative, and those whose integers do not fit a
 * byte. Their integers are 0.
 */
typedef struct device_kept {
    device_other *list; /* in any order; q is not set */
    uint64_t
        *count; /* added to. More than there is room for: those beyond are not there. NULL: none are kept */
    uint32_t room;
    float above, moved; /* |now| is at most so large, and so far from `before` */
    float most;         /* no |now| or |before| is as large; not of second moments */
} device_kept;

/* Once the others' values are there: listed elements go from one array to another, in either the tile's first one; q: their bits. */
typedef struct device_keeping {
    device_other *list;
    uint64_t count;
    void *to;
    const void *from;
    uint32_t size; /* of an element, 2 or 4 */
} device_keeping;

/*
 * Integers of a tile on their way to a device, in as few bits as the largest of each group of DEVICE_GROUP takes, and its sign. First a word of 32 bits for each group, its
 * head, and zeros up to a multiple of 16 bytes; then the groups. A head has in its lowest DEVICE_WIDTH_BITS bits the group's width, at most DEVICE_WIDTH_MOST (0: all are
 * 0, and nothing follows), and above them where its words begin, in units of 16 bytes, counted from the first head. A group has four lanes of `width` words, word k of lane j being word 4k + j of
 * the group: integer i is in lane i mod 4, two's complement, from bit (i / 4) width of the lane on, the lowest bits of a word first. So a thread has four integers that stand next to each other
 * in 16 bytes, or in two times 16. Integers behind the last one are 0. No integer is the least of its group's width: of second moments that says LEVEL_ZERO.
 * Aligned to 16 bytes.
 */
#define DEVICE_GROUP      128u
#define DEVICE_WIDTH_BITS 6u
#define DEVICE_WIDTH_MOST 30u

/*
 * Elements of a matrix in row-major order, the first one in column `phase`. The steps of element i are row_step[row] * column_step[column], as
 * in lattice_run; rows are counted from the first element's.
 */
typedef struct device_tile {
    const float *now, *before; /* before NULL: zeros */
    float *values;             /* of `move`: what a decoder gets; may be `before` */
    int8_t *few;               /* of `quantise`: the integers; of `move`: the same, or NULL: see packed */
    const uint32_t *packed;    /* of `move`: the integers, in groups; NULL, and no `few`: all zero */
    const float *low_rank;     /* sums of products of factors, for each element; NULL: none */
    const int32_t *low_whole;  /* the same as integers below 2^24, instead of it */
    const float *row_step, *column_step; /* column_step NULL: 1 */
    uint64_t count, columns, phase;
    float unit, per_unit, low_rank_unit;
    float offset[3];         /* of `move` */
    float up[3];             /* of `quantise` */
    device_level_sums *sums; /* of `quantise` */
    device_kept kept;        /* of `quantise` */
} device_tile;

/*
 * What the integers of a tile have to say (kernels.lattice_residual), in steps: written out, counted by magnitude, or both. `few`, `values`, `offset`, `up` and
 * `sums` of the tile are not looked at.
 */
typedef struct device_residuals {
    device_tile tile;
    float *to; /* NULL: not wanted */
    uint32_t
        *bin; /* bins; added to; NULL: not wanted. Of `most` + 1 = DEVICE_BINS at most, as kernels.bins_of */
    float per_unit; /* bins in a step */
    uint32_t most;
} device_residuals;
#define DEVICE_BINS 2048u

/* `n` elements from `first` on, to `to` elements behind the beginning of what is gathered. */
typedef struct device_piece {
    uint64_t first;
    uint32_t to, n;
} device_piece;
typedef struct device_gathering {
    float *to;
    const float *from;
    const device_piece *piece;
    uint64_t pieces;
} device_gathering;

/*
 * Integers of which most are 0, and nearly all others 1 or -1, in two bits each: 0, 1, 2 for -1, and 3 for any other, which stands among the others. Element i is in
 * the bits 2 (i mod 16) of word i / 16; those behind the last one are 0.
 */
typedef struct device_packing {
    const int8_t *few;
    uint64_t count;
    uint32_t *words;     /* (count + 15) / 16 */
    device_other *other; /* in any order */
    uint32_t room;       /* for others */
    uint64_t
        *others; /* how many there are; added to. More than there is room for: those beyond are not there */
} device_packing;

/* Of second moments, without a parent. */
#define DEVICE_LEVEL_ZERO (-128) /* instead of LEVEL_ZERO: the value is zero */
typedef struct device_levels {
    const float *now;
    float *values; /* of `move_levels` */
    int8_t *
        few; /* of `quantise_levels`: the integers, or NULL: only what is kept is wanted; of `move_levels`: the same, or NULL: see packed */
    const uint32_t *packed;      /* of `move_levels`: the integers, in groups; NULL, and no `few`: all zero */
    const int32_t *row, *column; /* levels of each row and column, or NULL: none */
    uint64_t count, columns, phase;
    int32_t birth, step; /* birth: at least 1 */
    float up;
    uint64_t *
        misfits; /* of `quantise_levels`: integers that do not fit a byte, and are not kept; added to. `few` is of no use if there are any */
    device_kept kept; /* of `quantise_levels` */
} device_levels;

/* Statistics of a tile, as kernels.sums_of has them, and of its rows. */
typedef struct device_sums {
    double now, moved, weighted;
    uint64_t finite, compared;
    float largest, least, farthest,
        lowest; /* lowest: what the lowest bit of `before` counts; infinite: all are zero */
    uint32_t before_bits, unused;
} device_sums;

typedef struct device_pass {
    const float *now, *before; /* before NULL: none */
    const float *weight;       /* of columns; NULL: none */
    const float *row_weight;   /* of rows; NULL: 1 */
    uint64_t count, columns, phase;
    float most[2];
    bool lattice;            /* before_bits and lowest as well */
    bool magnitudes;         /* rows and columns sum |now|, else what is positive */
    double *row, *row_count; /* sums over each row, and how many elements are in them; NULL: not wanted */
    device_sums *blocks;     /* room for device_pass_blocks(rows) */
    device_sums *all;        /* the result */
} device_pass;
/* Rows of a pass that one group of threads sums up. */
#define DEVICE_PASS_ROWS 8
static inline uint64_t device_pass_blocks(uint64_t rows) {
    return (rows + DEVICE_PASS_ROWS - 1) / DEVICE_PASS_ROWS;
}

/* Sums over columns, in as many parts as there are panels of rows: for the caller to add up. */
typedef struct device_columns {
    const float *now;
    const double *row_scale; /* of each row; NULL: no scales */
    uint64_t count, columns, phase, panels;
    float most;
    bool magnitudes;
    double *sum, *scales; /* panels x columns; scales NULL: none */
    uint32_t *count_of;   /* panels x columns */
} device_columns;

/* Sums over squares of what was given and of errors; as kernels.error_of, of both as they are, or rounded (kernels.cast) first. */
typedef struct device_errors {
    const float *given, *decoded;
    uint64_t count;
    device_sums *
        blocks; /* room for device_error_blocks(count): now: energy; moved: errors; farthest; finite; compared: those that are not finite */
    device_sums *all;
    ckd_dtype
        rounded; /* to it: CKD_BF16, CKD_F16; CKD_DTYPE_NONE: not. Then infinities and NaNs that are not the same in both are counted in `compared`, too */
} device_errors;
#define DEVICE_ERROR_ELEMENTS 16384u
static inline uint64_t device_error_blocks(uint64_t count) {
    return (count + DEVICE_ERROR_ELEMENTS - 1) / DEVICE_ERROR_ELEMENTS;
}

/* sums (rows x columns) = left (rows x rank) times right (rank x columns). */
typedef struct device_product {
    float *sums;
    const float *left, *right;
    uint64_t rows, columns, rank;
    bool left_turned, right_turned; /* it lies there transposed: rank x rows, columns x rank */
} device_product;

/*
 * The same of integers of a byte each, whose sums are exact: left is rows x rank, right lies there transposed, columns x rank. As tensor cores want it: rank is what
 * device_bytes_rank gives (zeros behind the last component), columns are as device_multiplies_bytes says, and addresses are multiples of 16.
 */
typedef struct device_byte_product {
    int32_t *sums;
    const int8_t *left, *right;
    uint64_t rows, columns, rank;
} device_byte_product;
/* A multiple of 16, or, where that would be more zeros than numbers, of 4. */
static inline uint32_t device_bytes_rank(uint32_t rank) {
    uint32_t to = rank > 8 ? 16 : 4;
    return (rank + to - 1) / to * to;
}
static inline bool device_multiplies_bytes(uint64_t columns) {
    return columns % 4 == 0;
}

/*
 * Components of a factor, one after the other: each value becomes a whole number over its component's scale, (int32_t)(|value * scale| + add) of them, where
 * |value * scale| counts as `most` at most.
 */
typedef struct device_rounding {
    float *at;           /* count x n */
    const double *scale; /* of each component: a power of two */
    uint32_t *largest;   /* of each: the largest of those numbers; raised */
    uint64_t n;
    uint32_t count; /* below 2^16 */
    double add, most;
} device_rounding;

typedef enum device_direction { DEVICE_TO_DEVICE, DEVICE_TO_HOST, DEVICE_ON_DEVICE } device_direction;

typedef struct device_backend {
    uint32_t version; /* DEVICE_VERSION: a backend of another one is not used */
    const char *name;

    /* 0 devices is no failure. */
    device_result (*count)(int *devices, device_failure *why);
    device_result (*describe)(device_about *about, int device, device_failure *why);
    /* Which device an address belongs to; -1: to none, it is the host's. */
    device_result (*owner)(int *device, const void *address, device_failure *why);

    device_result (*allocate)(void **out, int device, size_t bytes, device_failure *why);
    void (*release)(int device, void *memory);
    device_result (*allocate_pinned)(void **out, int device, size_t bytes, device_failure *why);
    void (*release_pinned)(int device, void *memory);

    /* background: of the lowest priority there is, which with CUDA is that of any stream whose maker asked for none. */
    device_result (*queue_open)(device_queue *out, int device, bool background, device_failure *why);
    void (*queue_close)(const device_queue *queue);
    /* What is put on the queue from now on waits for what is on the stream now. */
    device_result (*queue_behind)(const device_queue *queue, void *stream, device_failure *why);
    /* The other way round: what is put on the stream from now on waits for what is on the queue now. */
    device_result (*queue_before)(const device_queue *queue, void *stream, device_failure *why);
    /* Waits until all on the queue is done. */
    device_result (*finish)(const device_queue *queue, device_failure *why);

    /* Marks: moments in the order of a queue, for streams and threads to wait for. A mark that was never set has passed. */
    device_result (*mark_new)(void **out, int device, device_failure *why);
    void (*mark_free)(int device, void *mark);
    /* After all that is on the queue now; who waits for where it was before goes on doing so. */
    device_result (*mark_set)(void *mark, const device_queue *queue, device_failure *why);
    /* What is put on the stream, of the mark's device, from now on waits for it. */
    device_result (*mark_before)(void *mark, int device, void *stream, device_failure *why);
    /* The calling thread waits for it. */
    device_result (*mark_wait)(void *mark, int device, device_failure *why);

    device_result (*copy)(const device_queue *queue, void *to, const void *from, size_t bytes,
                          device_direction direction, device_failure *why);
    /* From a device: `rows` times `bytes` bytes, `stride` bytes apart there, one after the other where they go. */
    device_result (*copy_rows)(const device_queue *queue, void *to, const void *from, size_t bytes,
                               size_t stride, size_t rows, device_direction direction, device_failure *why);
    device_result (*zero)(const device_queue *queue, void *memory, size_t bytes, device_failure *why);

    /* Up to DEVICE_SPANS of them. false in *known: there is no such operation for these dtypes. */
    device_result (*elements)(const device_queue *queue, bool *known, const device_elements *what,
                              const device_span *spans, uint32_t count, device_failure *why);
    device_result (*hash)(const device_queue *queue, const device_pieces *spans, uint32_t count,
                          device_failure *why);
    device_result (*quantise)(const device_queue *queue, const device_tile *tile, device_failure *why);
    device_result (*move)(const device_queue *queue, const device_tile *tile, device_failure *why);
    device_result (*quantise_levels)(const device_queue *queue, const device_levels *tile,
                                     device_failure *why);
    device_result (*move_levels)(const device_queue *queue, const device_levels *tile, device_failure *why);
    device_result (*keep)(const device_queue *queue, const device_keeping *keeping, device_failure *why);
    device_result (*residuals)(const device_queue *queue, const device_residuals *residuals,
                               device_failure *why);
    device_result (*gather)(const device_queue *queue, const device_gathering *gathering,
                            device_failure *why);
    device_result (*pack)(const device_queue *queue, const device_packing *packing, device_failure *why);
    device_result (*sums)(const device_queue *queue, const device_pass *pass, device_failure *why);
    device_result (*columns)(const device_queue *queue, const device_columns *columns, device_failure *why);
    device_result (*errors)(const device_queue *queue, const device_errors *errors, device_failure *why);
    /* In single precision throughout: exact of integers below 2^24 whose sums are, too. Rows, columns and rank are below 2^31. */
    device_result (*product)(const device_queue *queue, const device_product *product, device_failure *why);
    /* false in *known: the device has none, and nothing was done. */
    device_result (*byte_product)(const device_queue *queue, bool *known, const device_byte_product *product,
                                  device_failure *why);
    device_result (*round)(const device_queue *queue, const device_rounding *rounding, device_failure *why);

    /* Of `count` streams, at most DEVICE_STREAMS, whose descriptions lie there; most: elements of the longest. */
    device_result (*classify)(const device_queue *queue, const device_classes *all, uint32_t count,
                              uint32_t most, device_failure *why);
    device_result (*split)(const device_queue *queue, device_split_step step, const device_split *all,
                           uint32_t count, uint32_t most, device_failure *why);
    device_result (*encode)(const device_queue *queue, const device_encoding *all, uint32_t count,
                            uint32_t most, device_failure *why);
    device_result (*decode)(const device_queue *queue, const device_decoding *all, uint32_t count,
                            device_failure *why);
} device_backend;

/* What libckptdelta_cuda.so has under this name. */
#define DEVICE_ENTRY "ckd_device_backend"
typedef const device_backend *(*device_entry)(void);

#ifdef __cplusplus
}
#endif

#endif
