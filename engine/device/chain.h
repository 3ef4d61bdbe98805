/*
 * Values of blocks, made in device memory from the root of their chains on. The host follows a chain, reads
 * and checks its payloads, and entropy-decodes the lossy ones. It sends integers, steps, factors and dense
 * symbol streams. The device makes the values of one block after the other in their final place, and their
 * content hashes. Internal to engine/: span_decode.c.
 *
 *   chain.c      collects what to send, block by block; any number of threads, each with its decoder
 *   chain_run.c  runs it on the device; one thread
 *
 * Addresses and sizes sent to a device never come from a payload that was not checked. They come from records
 * and decoded blocks. Kernels that read dense streams stay inside of them, whatever the streams contain.
 */
#ifndef ENGINE_DEVICE_CHAIN_H
#define ENGINE_DEVICE_CHAIN_H

#include "engine/device/dense.h"
#include "engine/decode/values.h"

#define CHAIN_LINKS      64u  /* largest length of a chain; the host decodes the links below */
#define CHAIN_EXCEPTIONS 256u /* largest number of exceptions of a lossy block */

typedef enum chain_form {
    CHAIN_VALUES, /* values as they are */
    CHAIN_SAME,   /* the values of the link before */
    CHAIN_CAST,   /* the values of the link before, rounded to another dtype; at most once per chain */
    CHAIN_STREAM, /* a dense symbol stream */
    CHAIN_LINEAR, /* a lossy block of integers on a lattice */
    CHAIN_LEVELS  /* a lossy block of second moments: levels of rows and columns */
} chain_form;

/* Steps and factor of columns or rows, as offsets in the array that they are sent in. */
typedef struct chain_factor {
    size_t step, factor;
    uint64_t count; /* integers of the factor; 0: none */
    bool has_step;
    ckd_dtype as; /* dtype in which they are sent: I8, F16 or F32 */
} chain_factor;

/* A side record, sent once for all chains of a run. */
typedef enum chain_side_kind { CHAIN_COLUMNS, CHAIN_ROWS, CHAIN_LEVEL_COLUMNS } chain_side_kind;
typedef struct chain_side {
    struct chain_side *next;
    hash128 content;
    chain_side_kind kind;
    bytes sent;
    chain_factor at;
    float *largest; /* magnitude, per component of the factor */
    /* Set by device_chains_run: where `sent` goes, and where the factor is widened to floats. */
    uint64_t base, wide;
} chain_side;
/* What the chains of a run share. */
typedef struct chain_sides {
    pthread_mutex_t mutex;
    chain_side *first;
    bool streams; /* dense streams are sent, too: a device reads many of them in the time of one */
} chain_sides;
void chain_sides_init(chain_sides *s);
void chain_sides_free(chain_sides *s);

typedef struct chain_link {
    const record *record;
    chain_form form;
    bool delta;      /* relative to the values of the link before; the stream then holds differences */
    bool hashed;     /* compare its values with its content hash */
    bool half;       /* f32 values sent as bf16 */
    bool packed;     /* lossy: integers are sent (pack.h); else all are 0 */
    size_t at;       /* of values or integers, in `sent`; of a stream, in `streams` */
    size_t size;     /* of a stream */
    uint64_t memory; /* of a stream: device memory that reading it takes */
    /* Lossy: */
    uint64_t columns, phase, rows;
    uint32_t rank;       /* of the factors as sent, padded with zeros */
    lattice_run run;     /* linear */
    int32_t birth, step; /* levels */
    bool has_rows;
    size_t row; /* linear: a step per row; levels: integers */
    chain_factor right, left;
    chain_side *right_side, *left_side; /* NULL: right, left are the chain's own */
    uint32_t exceptions;
    size_t exception_at, exception_bits; /* u32 each; the bits in the values' dtype */
} chain_link;

/* The chain of one block. Zero-initialise; release with device_chain_free. */
typedef struct device_chain {
    const view_block *block; /* set by the caller */
    chain_link *links;       /* from the root on */
    uint32_t count, room;    /* count 0: a device cannot make the block */
    uint32_t cast;           /* index of the link that rounds; 0: none */
    bytes sent, streams;
    void *to;      /* device memory for the values, contiguous; set by the caller */
    bool bad;      /* set by device_chains_run: the result is not what was saved */
    uint64_t base; /* set by device_chains_run */
    void *wide;    /* set by device_chains_run: values before they are rounded */
} device_chain;
void device_chain_free(device_chain *c);

/*
 * Collects what a device needs to make the values of the chain's block, one of `v`. Some links do not suit a device.
 * The host decodes these, with all links below them, and sends values. They are links with sparse or framed streams,
 * other codings, wide integers, optimizer steps, or a parent in several blocks. If the block itself is such a link,
 * count is 0, and the caller uses device_chain_values. Errors: as block_values, for what the host decodes.
 */
ckd_status device_chain_make(device_chain *c, chain_sides *sides, decoder *d, const view *v, ckd_error *err);
/*
 * Returns memory for the block's values, which the caller decodes and verifies. Only they are sent then.
 * NULL: out of memory.
 */
void *device_chain_values(device_chain *c, ckd_error *err);
/*
 * Called when the values are there. Sends f32 values as bf16, in half the size, if nearly all of them are
 * exact as bf16. Errors: NOMEM.
 */
ckd_status device_chain_filled(device_chain *c, ckd_error *err);

/* Returns the device memory that these chains take, hashes included. */
uint64_t device_chains_memory(const device_chain *chains, size_t count, const chain_sides *sides);
/*
 * Makes the values of all chains in their `to`, and compares their hashes. A chain becomes bad if a hash
 * differs or a stream does not end where it should; its values are undefined then. memory: as much device
 * memory as device_chains_memory says, aligned to 256 bytes. Done when it returns. Errors: NOMEM, DEVICE;
 * UNSUPPORTED (the backend lacks an operation).
 */
ckd_status device_chains_run(device_lease *lease, void *memory, device_chain *chains, size_t count,
                             chain_sides *sides, ckd_error *err);

#endif
