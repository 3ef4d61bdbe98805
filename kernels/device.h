/*
 * Arithmetic on tensors in device memory: one table of functions per backend. kernels/kernels.h defines the
 * operations. This table applies them to many elements at a time, in memory that the host cannot read, in the
 * order of a queue. The only backend is CUDA, a shared object of its own (libckptdelta_cuda.so), which is
 * opened when a device is first needed.
 *
 * Work on a queue runs in the order given; queue_after_stream puts it after a stream of the caller. It may run
 * after the call returns, so buffers must stay as they are until device_backend.finish. No call waits for a whole
 * device, uses a default stream, allocates (except `allocate` and `allocate_pinned`), or changes the calling
 * thread's current device. Only the first product of a queue may wait and allocate. Thread-safe, if only one
 * thread at a time uses a queue.
 *
 * A device's failure never ends the process: device_failure reports the call and the reason.
 */
#ifndef KERNELS_DEVICE_H
#define KERNELS_DEVICE_H

#include "kernels/device_symbols.h"
#include "kernels/kernels.h"

/*
 * A tensor of at most this many bytes is copied to the host and coded there: a launch and a wait take longer
 * than the bus. Outside panels, block_probe_of examines such a tensor as a whole.
 */
#define DEVICE_SMALL (UINT64_C(64) << 10)

#ifdef __cplusplus
extern "C" {
#endif

#define DEVICE_VERSION 11

typedef enum device_result {
    DEVICE_DONE,
    DEVICE_ABSENT, /* no driver, or no such device */
    DEVICE_FULL,   /* out of device memory, or of memory that can be pinned */
    DEVICE_FAILED  /* anything else; contents of device memory may be lost */
} device_result;

typedef struct device_failure {
    device_result result;
    char call[48];    /* "cudaMalloc" */
    char reason[160]; /* in the words of the backend's library */
} device_failure;

typedef struct device_info {
    char name[96];
    uint64_t memory, memory_free; /* bytes */
    uint32_t processors;
    uint32_t major, minor; /* compute capability */
} device_info;

/* A stream of a device, in the backend's type (cudaStream_t), and private parts of the backend. */
typedef struct device_queue {
    int device;
    void *stream, *products, *finished; /* products, finished: private */
} device_queue;

/* ---- operations on elements ---- */

/* Largest number of spans per call: many small tensors take one launch. */
#define DEVICE_SPANS 32

/* `to` may be `from`. Addresses are multiples of the element's size; multiples of 16 bytes are faster. */
typedef struct device_span {
    void *to;
    const void *from, *first, *second; /* as the operation says; else NULL */
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
    DEVICE_WIDEN,    /* kernels.widen: f16, bf16 or f32 to f32; also i8: integers as floats */
    DEVICE_STEP /* kernels.optimizer_step, f32: from: parent's values; first, second: the rule's inputs */
} device_operation;

/* Parameters of all spans of a call. */
typedef struct device_elements {
    device_operation operation;
    ckd_dtype dtype, to_dtype; /* to_dtype: for DEVICE_CAST */
    const step_rule *rule;     /* for DEVICE_STEP */
} device_elements;

/*
 * Bytes whose pages of 4 KiB are hashed (XXH3-64) into `to`; the last page may be shorter. values: any address;
 * multiples of 8 are fastest.
 */
typedef struct device_hash_span {
    const void *values;
    uint64_t bytes;
    uint64_t *to;
} device_hash_span;
#define DEVICE_HASH_PAGE 4096u

/* ---- operations on lossy tiles ---- */

/* Sums over the rounded integers of a tile, in device memory. Zero before the first call. */
typedef struct device_level_sums {
    int64_t below[3];  /* distances of |residual| below |q|, for |q| = 1, 2, more; in units of 2^-30 */
    uint64_t count[3]; /* their numbers */
    /* Number of integers that do not fit a byte and are no exceptions. If it is not 0, `q8` must not be used. */
    uint64_t misfits;
} device_level_sums;

/* An element of a tile, in a list. */
typedef struct device_element_at {
    uint32_t at;
    int32_t q;
} device_element_at;

/*
 * Exceptions of a tile: elements beyond the limits, infinite, NaN, or (second moments) negative, and elements
 * whose integers do not fit a byte. Their integers are 0.
 */
typedef struct device_exceptions {
    device_element_at *list; /* in any order; q is not set */
    /* Number of exceptions, added to. If it exceeds the capacity, the list lacks the rest. NULL: none wanted. */
    uint64_t *count;
    uint32_t capacity;
    float above, moved; /* limits of |now|, and of |now - parent_values| */
    float max;          /* |now| and |parent_values| must be below it; not for second moments */
} device_exceptions;

/*
 * Copies listed elements from one array to another, after all other values are in place. Sets q to their bits. Both
 * arrays begin with the tile's first element.
 */
typedef struct device_exception_copy {
    device_element_at *list;
    uint64_t count;
    void *to;
    const void *from;
    uint32_t size; /* of an element: 2 or 4 */
} device_exception_copy;

/* Elements that overwrite others: to[at[i]] = from[i]. */
typedef struct device_scattering {
    void *to;
    const uint32_t *at; /* without duplicates */
    const void *from;
    uint64_t count;
    uint32_t size; /* of an element: 2 or 4; `to` and `from` are aligned to it */
} device_scattering;

/*
 * Integers of a tile on their way to a device, packed in groups of DEVICE_GROUP. A group takes as few bits per integer
 * as its largest magnitude and a sign need.
 *
 * First come the heads: a 32-bit word per group, then zeros up to a multiple of 16 bytes. The lowest DEVICE_WIDTH_BITS
 * bits of a head are the group's width, at most DEVICE_WIDTH_MAX. Width 0: all integers are 0, and the group has no
 * words. The bits above are the place of the group's words, in units of 16 bytes from the first head.
 *
 * Then come the groups. A group has four lanes of `width` words; word k of lane j is word 4k + j of the group. Integer
 * i is in lane i mod 4, in two's complement, from bit (i / 4) width of the lane on, the lowest bits of a word first. So
 * a thread finds four neighbouring integers in 16 or in 32 bytes. Missing integers of the last group are 0. No
 * integer is the smallest number of its width; for second moments that stands for LEVEL_ZERO. Aligned to 16 bytes.
 */
#define DEVICE_GROUP      128u
#define DEVICE_WIDTH_BITS 6u
#define DEVICE_WIDTH_MAX  30u

/*
 * Elements of a matrix in row-major order; the first one is in column `phase`. The step of element i is
 * row_step[row] * column_step[column], as in lattice_run. Rows are counted from the first element's row.
 */
typedef struct device_tile {
    const float *now, *parent_values;    /* parent_values NULL: zeros */
    float *values;                       /* `move`: decoded values; may be `parent_values` */
    int8_t *q8;                          /* `quantise`: output; `move`: input, or NULL: see packed */
    const uint32_t *packed;              /* `move`: the integers, in groups; NULL, and no `q8`: all zero */
    const float *low_rank;               /* sums of products of factors, per element; NULL: none */
    const int32_t *low_whole;            /* these sums as integers below 2^24, instead of low_rank */
    const float *row_step, *column_step; /* column_step NULL: 1 */
    uint64_t count, columns, phase;
    float unit, per_unit, low_rank_unit;
    float offset[3];              /* for `move` */
    float up[3];                  /* for `quantise` */
    device_level_sums *sums;      /* for `quantise` */
    device_exceptions exceptions; /* for `quantise` */
} device_tile;

/*
 * Residuals of a tile in steps, before rounding (kernels.lattice_residual): written out, counted by
 * magnitude, or both. `q8`, `values`, `offset`, `up` and `sums` of the tile are ignored.
 */
typedef struct device_residuals {
    device_tile tile;
    float *to; /* NULL: not wanted */
    /* `max` + 1 bins, at most DEVICE_BINS, as in kernels.bins_of; added to. NULL: not wanted. */
    uint32_t *bin;
    float per_unit; /* bins per step */
    uint32_t max;
} device_residuals;
#define DEVICE_BINS 2048u

/* `n` elements from `first` on, copied to offset `to` of the result. */
typedef struct device_slice {
    uint64_t first;
    uint32_t to, n;
} device_slice;
typedef struct device_gathering {
    float *to;
    const float *from;
    const device_slice *slice;
    uint64_t slices;
} device_gathering;

/*
 * Integers in two bits each; nearly all are 0, 1 or -1. The bits are 0, 1, 2 for -1, and 3 for a wide integer,
 * which is in the list `wide`. Element i has two bits of word i / 16, from bit 2 (i mod 16) on. Bits behind
 * the last element are 0.
 */
typedef struct device_packing {
    const int8_t *q8;
    uint64_t count;
    uint32_t *words;         /* (count + 15) / 16 */
    device_element_at *wide; /* in any order */
    uint32_t capacity;       /* of `wide` */
    /* Number of wide integers, added to. If it exceeds the capacity, the list lacks the rest. */
    uint64_t *wide_count;
} device_packing;

/* Second moments, without a parent. */
#define DEVICE_LEVEL_ZERO (-128) /* stands for LEVEL_ZERO: the value is zero */
typedef struct device_levels {
    const float *now;
    float *values; /* for `move_levels` */
    /* `quantise_levels`: output, or NULL: only exceptions are wanted. `move_levels`: input, or NULL: see packed. */
    int8_t *q8;
    const uint32_t *packed;      /* `move_levels`: the integers, in groups; NULL, and no `q8`: all zero */
    const int32_t *row, *column; /* levels per row and column; NULL: none */
    uint64_t count, columns, phase;
    int32_t birth, step; /* birth: at least 1 */
    float up;
    /*
     * `quantise_levels`: number of integers that do not fit a byte and are no exceptions; added to. If it is not 0,
     * `q8` must not be used.
     */
    uint64_t *misfits;
    device_exceptions exceptions; /* for `quantise_levels` */
} device_levels;

/* Statistics of a tile, as in kernels.sums_of. */
typedef struct device_sums {
    double now, moved, weighted;
    uint64_t finite, compared;
    /* lowest: value of the lowest bit in any of the parent's values; infinite: all are zero. */
    float largest, smallest, farthest, lowest;
    uint32_t parent_bits, unused;
} device_sums;

typedef struct device_pass {
    const float *now, *parent_values; /* parent_values NULL: none */
    const float *weight;              /* of columns; NULL: none */
    const float *row_weight;          /* of rows; NULL: 1 */
    uint64_t count, columns, phase;
    float max[2];
    bool lattice;            /* also compute parent_bits and lowest */
    bool magnitudes;         /* rows sum |now|; else positive values */
    double *row, *row_count; /* sums over each row, and the numbers of their elements; NULL: not wanted */
    device_sums *blocks;     /* room for device_pass_blocks(rows) */
    device_sums *all;        /* the result */
} device_pass;
/* Rows of a pass that one group of threads sums. */
#define DEVICE_PASS_ROWS 8
static inline uint64_t device_pass_blocks(uint64_t rows) {
    return (rows + DEVICE_PASS_ROWS - 1) / DEVICE_PASS_ROWS;
}

/* Sums over columns, one part per panel of rows; the caller adds up the parts. */
typedef struct device_columns {
    const float *now;
    const double *row_scale; /* per row; NULL: no scales */
    uint64_t count, columns, phase, panels;
    float max;
    bool magnitudes;
    double *sum, *scales; /* panels x columns; scales NULL: none */
    uint32_t *count_of;   /* panels x columns */
} device_columns;

/*
 * Sums of squares of input values and of errors, as in kernels.error_of. Both arrays may be rounded first
 * (kernels.cast).
 */
typedef struct device_errors {
    const float *given, *decoded;
    uint64_t count;
    /*
     * Room for device_error_blocks(count). Used fields: now (energy), moved (errors), farthest, finite, and
     * compared (number of errors that are not finite).
     */
    device_sums *blocks;
    device_sums *all;
    /*
     * CKD_BF16 or CKD_F16: round to it; CKD_DTYPE_NONE: do not. If rounded, `compared` also counts infinities
     * and NaNs that differ between the arrays.
     */
    ckd_dtype rounded;
} device_errors;
#define DEVICE_ERROR_ELEMENTS 16384u
static inline uint64_t device_error_blocks(uint64_t count) {
    return (count + DEVICE_ERROR_ELEMENTS - 1) / DEVICE_ERROR_ELEMENTS;
}

/*
 * The high halves of a moment's values: only half the bytes cross the bus. Input values are rounded so that their
 * updates do not grow, decoded values so that their updates do not shrink (scalar_moment_half).
 */
typedef struct device_halves {
    uint16_t *to;
    const float *from;
    uint64_t count;
    bool second;  /* second moments */
    bool decoded; /* else input values */
} device_halves;

/* Updates of an optimizer, |m| / (sqrt(v) + eps), for each eps. An update that is not finite counts as 0. */
#define DEVICE_UPDATE_BOUNDS 2
typedef struct device_updates {
    const float *values;   /* values of one moment */
    const uint16_t *other; /* the halves of the other one */
    uint64_t count;
    bool second; /* `values` are second moments */
    double eps[DEVICE_UPDATE_BOUNDS];
    double per[DEVICE_UPDATE_BOUNDS]; /* 1 / the limit of updates with that eps; 0: no limit */
    double *largest;                  /* DEVICE_UPDATE_BOUNDS; raised to the largest update */
    uint64_t *above;                  /* number of elements beyond any limit, added to */
} device_updates;

/* sums (rows x columns) = left (rows x rank) times right (rank x columns). */
typedef struct device_product {
    float *sums;
    const float *left, *right;
    uint64_t rows, columns, rank;
    bool left_transposed, right_transposed; /* stored transposed: rank x rows, columns x rank */
} device_product;

/*
 * A product of integers of one byte, whose sums are exact. left is rows x rank; right is stored transposed,
 * columns x rank. Tensor cores need a rank from device_bytes_rank (with zeros behind the last component),
 * columns that device_multiplies_bytes accepts, and addresses that are multiples of 16.
 */
typedef struct device_byte_product {
    int32_t *sums;
    const int8_t *left, *right;
    uint64_t rows, columns, rank;
} device_byte_product;
/* Rounds the rank up to a multiple of 16, or of 4 if that would be more zeros than numbers. */
static inline uint32_t device_bytes_rank(uint32_t rank) {
    uint32_t to = rank > 8 ? 16 : 4;
    return (rank + to - 1) / to * to;
}
static inline bool device_multiplies_bytes(uint64_t columns) {
    return columns % 4 == 0;
}

/*
 * Rounds the components of a factor, one after the other. Each value becomes a whole number over its
 * component's scale: (int32_t)(|value * scale| + add) over scale, where |value * scale| counts as `max` at
 * most.
 */
typedef struct device_rounding {
    float *at;           /* count x n */
    const double *scale; /* per component: a power of two */
    uint32_t *largest;   /* per component: raised to the largest of these numbers */
    uint64_t n;
    uint32_t count; /* below 2^16 */
    double add, max;
} device_rounding;

typedef enum device_direction { DEVICE_TO_DEVICE, DEVICE_TO_HOST, DEVICE_ON_DEVICE } device_direction;

/*
 * Rows of `bytes` bytes, `stride` bytes apart, that are copied to contiguous memory, or to rows `to_stride` bytes
 * apart. Strides are at least `bytes` and below 2^31. Rows on the host cannot be copied.
 */
typedef struct device_rows {
    void *to;
    const void *from;
    size_t bytes, stride, rows;
    device_direction direction;
    size_t to_stride; /* 0: contiguous */
} device_rows;

typedef struct device_backend {
    uint32_t version; /* DEVICE_VERSION; a backend of another version is not used */
    const char *name;

    /* Having 0 devices is not a failure. */
    device_result (*count)(int *devices, device_failure *why);
    device_result (*describe)(device_info *about, int device, device_failure *why);
    /* Finds the device that an address belongs to; -1: the host. */
    device_result (*owner)(int *device, const void *address, device_failure *why);

    device_result (*allocate)(void **out, int device, size_t bytes, device_failure *why);
    void (*release)(int device, void *memory);
    device_result (*allocate_pinned)(void **out, int device, size_t bytes, device_failure *why);
    void (*release_pinned)(int device, void *memory);

    /* background: with the lowest priority, which in CUDA is the default priority of streams. */
    device_result (*queue_open)(device_queue *out, int device, bool background, device_failure *why);
    void (*queue_close)(const device_queue *queue);
    /* Work put on the queue from now on waits for what is on the stream now. */
    device_result (*queue_after_stream)(const device_queue *queue, void *stream, device_failure *why);
    /* The reverse: work put on the stream from now on waits for what is on the queue now. */
    device_result (*stream_after_queue)(const device_queue *queue, void *stream, device_failure *why);
    /* Waits until all work on the queue is done. */
    device_result (*finish)(const device_queue *queue, device_failure *why);

    /*
     * Events: points of a queue that streams and threads can wait for. Waiting for an event that was never recorded
     * returns at once.
     */
    device_result (*event_new)(void **out, int device, device_failure *why);
    void (*event_free)(int device, void *event);
    /* Records the event after all work on the queue. Earlier waits keep waiting for its earlier position. */
    device_result (*event_record)(void *event, const device_queue *queue, device_failure *why);
    /* Work put on the stream from now on waits for the event. Both are of the same device. */
    device_result (*stream_wait_event)(void *event, int device, void *stream, device_failure *why);
    /* The calling thread waits for the event. */
    device_result (*event_wait)(void *event, int device, device_failure *why);

    device_result (*copy)(const device_queue *queue, void *to, const void *from, size_t bytes,
                          device_direction direction, device_failure *why);
    device_result (*copy_rows)(const device_queue *queue, const device_rows *rows, device_failure *why);
    device_result (*zero)(const device_queue *queue, void *memory, size_t bytes, device_failure *why);

    /* Takes up to DEVICE_SPANS spans. *known = false: there is no such operation for these dtypes. */
    device_result (*elements)(const device_queue *queue, bool *known, const device_elements *what,
                              const device_span *spans, uint32_t count, device_failure *why);
    device_result (*hash)(const device_queue *queue, const device_hash_span *spans, uint32_t count,
                          device_failure *why);
    device_result (*quantise)(const device_queue *queue, const device_tile *tile, device_failure *why);
    device_result (*move)(const device_queue *queue, const device_tile *tile, device_failure *why);
    device_result (*quantise_levels)(const device_queue *queue, const device_levels *tile,
                                     device_failure *why);
    device_result (*move_levels)(const device_queue *queue, const device_levels *tile, device_failure *why);
    device_result (*keep)(const device_queue *queue, const device_exception_copy *keeping,
                          device_failure *why);
    device_result (*scatter)(const device_queue *queue, const device_scattering *scattering,
                             device_failure *why);
    device_result (*residuals)(const device_queue *queue, const device_residuals *residuals,
                               device_failure *why);
    device_result (*gather)(const device_queue *queue, const device_gathering *gathering,
                            device_failure *why);
    device_result (*pack)(const device_queue *queue, const device_packing *packing, device_failure *why);
    device_result (*sums)(const device_queue *queue, const device_pass *pass, device_failure *why);
    device_result (*columns)(const device_queue *queue, const device_columns *columns, device_failure *why);
    device_result (*errors)(const device_queue *queue, const device_errors *errors, device_failure *why);
    device_result (*halves)(const device_queue *queue, const device_halves *halves, device_failure *why);
    device_result (*updates)(const device_queue *queue, const device_updates *updates, device_failure *why);
    /*
     * In single precision throughout: exact for integers if they and their sums are below 2^24. Rows, columns
     * and rank are below 2^31.
     */
    device_result (*product)(const device_queue *queue, const device_product *product, device_failure *why);
    /* *known = false: the device has no such product, and nothing was done. */
    device_result (*byte_product)(const device_queue *queue, bool *known, const device_byte_product *product,
                                  device_failure *why);
    device_result (*round)(const device_queue *queue, const device_rounding *rounding, device_failure *why);

    /*
     * all: descriptions of `count` streams, at most DEVICE_STREAMS, in device memory; max: number of elements
     * of the longest stream.
     */
    device_result (*classify)(const device_queue *queue, const device_classes *all, uint32_t count,
                              uint32_t max, device_failure *why);
    device_result (*split)(const device_queue *queue, device_split_step step, const device_split *all,
                           uint32_t count, uint32_t max, device_failure *why);
    device_result (*encode)(const device_queue *queue, const device_encoding *all, uint32_t count,
                            uint32_t max, device_failure *why);
    device_result (*decode)(const device_queue *queue, const device_decoding *all, uint32_t count,
                            device_failure *why);
} device_backend;

/* Name of the entry point of libckptdelta_cuda.so. */
#define DEVICE_ENTRY "ckd_device_backend"
typedef const device_backend *(*device_entry)(void);

#ifdef __cplusplus
}
#endif

#endif
