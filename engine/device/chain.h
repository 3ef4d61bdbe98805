/*
 * Values of blocks, made in the memory of a device from the root of their chains on. The host follows a chain, reads and checks its payloads and entropy-decodes what
 * is lossy; to the device go integers, steps, factors and dense symbol streams, from which it makes the values of one block after the other where they
 * are to be, and their content hashes. Internal to engine/: span_decode.c.
 *
 *   chain.c      what goes to the device, block by block; any number of threads, each with its decoder
 *   chain_run.c  what happens there; one thread
 *
 * Nothing that a device is told here depends on a payload that was not checked: places and sizes are those of records and of decoded blocks, and dense streams
 * are read by kernels that stay inside of them, whatever they say.
 */
#ifndef ENGINE_DEVICE_CHAIN_H
#define ENGINE_DEVICE_CHAIN_H

#include "engine/device/dense.h"
#include "engine/decode/values.h"

#define CHAIN_LINKS      64u  /* at most: the host decodes what is below */
#define CHAIN_EXCEPTIONS 256u /* values that a lossy block keeps as they are, at most */

typedef enum chain_form {
    CHAIN_VALUES, /* as they are */
    CHAIN_SAME,   /* those of the link before */
    CHAIN_CAST,   /* those of the link before, of another dtype, rounded; once in a chain at most */
    CHAIN_STREAM, /* a dense symbol stream */
    CHAIN_LINEAR, /* a lossy block of integers on a lattice */
    CHAIN_LEVELS  /* one of second moments: levels of rows and columns */
} chain_form;

/* Columns' or rows' steps and factor, counted from the beginning of what they are sent with. */
typedef struct chain_factor {
    size_t step, factor;
    uint64_t count; /* integers of the factor; 0: none */
    bool has_step;
    ckd_dtype as; /* what they are sent as: I8, F16 or F32 */
} chain_factor;

/* What blocks share with others, sent once for all chains of a run. */
typedef enum chain_side_kind { CHAIN_COLUMNS, CHAIN_ROWS, CHAIN_LEVEL_COLUMNS } chain_side_kind;
typedef struct chain_side {
    struct chain_side *next;
    hash128 content;
    chain_side_kind kind;
    bytes sent;
    chain_factor at;
    float *largest;      /* of each component of the factor */
    uint64_t base, wide; /* of device_chains_run: where it is sent to, and its factor as floats */
} chain_side;
typedef struct chain_sides {
    pthread_mutex_t mutex;
    chain_side *first;
} chain_sides;
void chain_sides_init(chain_sides *s);
void chain_sides_free(chain_sides *s);

typedef struct chain_link {
    const record *record;
    chain_form form;
    bool delta;      /* on the values of the link before; of a stream: differences to them */
    bool hashed;     /* its values are compared with its content hash */
    bool half;       /* values of f32, sent as bf16 */
    bool packed;     /* lossy: integers are sent (pack.h); else all are 0 */
    size_t at;       /* values or integers, in what the chain sends; a stream: in its streams */
    size_t size;     /* of a stream */
    uint64_t memory; /* of a stream: what reading it takes of the device's */
    /* lossy: */
    uint64_t columns, phase, rows;
    uint32_t rank;       /* of the factors as they are sent: zeros behind their last component */
    lattice_run run;     /* linear */
    int32_t birth, step; /* levels */
    bool has_rows;
    size_t row; /* linear: a step for each row; levels: integers */
    chain_factor right, left;
    chain_side *right_side, *left_side; /* NULL: the chain's own */
    uint32_t exceptions;
    size_t exception_at, exception_bits; /* u32 each; the bits in the values' dtype */
} chain_link;

/* One block's. Zero-initialise; device_chain_free. */
typedef struct device_chain {
    const view_block *block;
    chain_link *links;    /* from the root on */
    uint32_t count, room; /* count 0: nothing of it is for a device */
    uint32_t cast;        /* the link that rounds; 0: none */
    bytes sent, streams;
    void *to;      /* where the values are to be, contiguous, in the device's memory: set by the caller */
    bool bad;      /* of device_chains_run: what came out is not what was saved */
    uint64_t base; /* of device_chains_run */
    void *wide;    /* likewise: what is to be rounded */
} device_chain;
void device_chain_free(device_chain *c);

/*
 * What the block's values are made from on a device. Links that are none for a device are decoded by the host with all that they build on, and sent as values: those of sparse
 * and framed streams, other codings, wide integers, optimizer steps, and those whose parent's values stand in several blocks. If the block
 * itself is such a one, count is 0, and device_chain_values is for the caller. streams: dense streams go to the device, too (a device reads
 * many of them in the time of one). Errors: as block_values, of what the host decodes.
 */
ckd_status device_chain_make(device_chain *c, chain_sides *sides, decoder *d, view_cache *cache,
                             const view *v, const view_block *b, bool streams, ckd_error *err);
/* Room for the values of the block, decoded and verified elsewhere, which then are all that is sent of it. NULL: out of memory. */
void *device_chain_values(device_chain *c, const view_block *b, ckd_error *err);
/*
 * They are there. Those of f32 that nearly all have no more bits than bf16 are sent as such: of half the size. Errors: NOMEM.
 */
ckd_status device_chain_filled(device_chain *c, ckd_error *err);

/* Memory of the device that these chains take; hashes included. */
uint64_t device_chains_memory(const device_chain *chains, size_t count, const chain_sides *sides);
/*
 * Makes the values of all chains in their `to`s, and compares their hashes; where one is not as it was saved, or a stream does not end where it should, the chain
 * is bad, and its values are anything. memory: of the device, as much as device_chains_memory says, aligned to 256 bytes. Done when it returns. Errors: NOMEM, DEVICE; UNSUPPORTED (the backend lacks an operation).
 */
ckd_status device_chains_run(device_lease *lease, void *memory, device_chain *chains, size_t count,
                             chain_sides *sides, ckd_error *err);

#endif
