/* The interface of engine/device/ for other rooms. README.md has an overview. */
#ifndef ENGINE_DEVICE_DEVICE_H
#define ENGINE_DEVICE_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/threads.h"
#include "codec/entropy/entropy.h"
#include "engine/common/common.h"
#include "engine/decode/decode.h"
#include "engine/store/store.h"
#include "kernels/device.h"
#include "kernels/device_open.h"

/*
 * Devices as the engine uses them. A lease is a queue, ordered after and before the work on the caller's stream, with
 * two buffers of pinned memory. Values travel through one buffer while the host works on the other.
 */

#define DEVICE_STAGE (UINT64_C(8) << 20) /* bytes of a buffer of pinned memory */
#define DEVICE_MIN_ELEMENTS \
    (UINT64_C(1) << 14) /* elements; the host finishes fewer before a device has even started */

typedef struct device_lease {
    struct device_lease *next;
    const device_backend *backend;
    device_queue queue;
    void *stream; /* the stream of the lease's current user */
    void *pinned[2];
    const void *reader; /* the reader whose elements are in `pinned`; NULL: none */
    void *memory;       /* device memory for the current user; kept for the next one */
    uint64_t memory_size;
} device_lease;

/*
 * Takes an unused lease or opens a new one; device_release returns it. `device` names the device. Work that
 * is on its stream now comes before all work on the lease's queue. address: memory to be read or written,
 * which must belong to the device. Errors: INVALID (the address belongs to the host, or to another device),
 * DEVICE, NOMEM.
 */
ckd_status device_acquire(device_lease **out, ckd_store *store, const ckd_device *device, const void *address,
                          ckd_error *err);
/*
 * Checks that the address belongs to the device. Errors: INVALID (it belongs to the host, or to another
 * device), DEVICE.
 */
ckd_status device_check_address(const device_backend *backend, int device, const void *address,
                                ckd_error *err);
void device_release(ckd_store *store, device_lease *lease);
/* Like device_release, for a lease whose queue has no unfinished work. */
void device_release_idle(ckd_store *store, device_lease *lease);
/* Frees the device memory of unused leases: the caller may need it. */
void device_leases_trim(ckd_store *store);
/* Closes the leases of a store that is being closed. */
void device_leases_close(ckd_store *store);

/* Reads a tensor's region in device memory from beginning to end, one buffer ahead. */
typedef struct device_reader {
    device_lease *lease;
    const uint8_t *data;
    /* The same elements of the parent, in the same layout, if the device may have them; else NULL. */
    const uint8_t *parent_values;
    size_t element;
    uint64_t elements; /* in the region, or in some of its columns */
    uint64_t end;      /* limit of reading ahead; no read goes beyond it */
    /* A row has `width` elements, and rows begin `stride` elements apart. width = elements: contiguous. */
    uint64_t width, stride;
    struct {
        uint64_t first, count;
    } buffer[2]; /* contents of lease->pinned; the buffer that is not current may still be filling */
    int current;
} device_reader;
device_reader device_reader_of(device_lease *lease, const void *data, size_t element, uint64_t elements);
/* Makes a reader of `width` columns from `first` on, in rows of `columns`, for all rows of `whole`. */
device_reader device_reader_columns(const device_reader *whole, uint64_t first, uint64_t width,
                                    uint64_t columns);
/* Queues a copy of `count` elements from `first` on to contiguous memory elsewhere on the device. */
ckd_status device_gather(const device_reader *r, void *to, uint64_t first, uint64_t count, ckd_error *err);
/* Like device_gather, but copies the parent's elements (`parent_values`). */
ckd_status device_gather_before(const device_reader *r, void *to, uint64_t first, uint64_t count,
                                ckd_error *err);
/* Tells whether the reader's elements at `data` are contiguous and aligned to their size, as kernels need them. */
static inline bool device_is_contiguous(const device_reader *r, const void *data) {
    return r->width == r->stride && (uintptr_t)data % r->element == 0;
}
/* A ckd_read_fn whose context is a device_reader. */
ckd_status device_read(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err);

/*
 * Reads at most DEVICE_STAGE bytes with one copy and one wait, through a lease just taken. *values stays
 * valid until the lease is used again. Errors: DEVICE.
 */
ckd_status device_read_small(const void **values, device_lease *lease, const void *from, uint64_t size,
                             ckd_error *err);

/*
 * Returns `size` bytes of device memory. Calls share one allocation, and its earlier contents are lost.
 * Errors: NOMEM, DEVICE.
 */
ckd_status device_memory(void **out, device_lease *lease, uint64_t size, ckd_error *err);

/* Returns the number of pages in `size` bytes, which are hashed separately. */
static inline uint64_t device_hash_pages_of(uint64_t size) {
    return (size + DEVICE_HASH_PAGE - 1) / DEVICE_HASH_PAGE;
}
/*
 * Computes content hashes of stretches of device memory, and sets `to` in each of them. to: device memory for
 * one u64 per page of all stretches. Errors: NOMEM, DEVICE.
 */
ckd_status device_hash(hash128 *out, device_lease *lease, device_hash_span *stretches, size_t count,
                       uint64_t *to, ckd_error *err);

/*
 * Copies slices of host memory to device memory, one behind the other, through the pinned memory. from NULL: pads with
 * undefined bytes. Nothing else may use the lease between begin and end. Done when device_put_end returns. Errors:
 * DEVICE.
 */
typedef struct device_putting {
    device_lease *lease;
    uint8_t *to;
    uint64_t filled; /* bytes of the current buffer of pinned memory */
    int stage;       /* its index */
    device_failure why;
} device_putting;
device_putting device_put_begin(device_lease *lease, void *to);
void device_put_add(device_putting *p, const void *from, uint64_t size);
ckd_status device_put_end(device_putting *p, ckd_error *err);
/* Copy between host and device memory through the pinned memory. Done when they return. */
ckd_status device_put(device_lease *lease, void *to, const void *from, uint64_t size, ckd_error *err);
ckd_status device_get(device_lease *lease, void *to, const void *from, uint64_t size, ckd_error *err);
/* Like device_put; later work on the caller's stream comes after it. */
ckd_status device_write(device_lease *lease, void *to, const void *from, uint64_t size, ckd_error *err);
/* Like device_write, with a lease of its own. Errors: those of device_acquire. */
ckd_status device_write_once(ckd_store *store, const ckd_device *device, void *to, const void *from,
                             uint64_t size, ckd_error *err);

/*
 * Batches of dense symbol streams, written or read in device memory. A batch brings the kernels the tables that codec/
 * makes.
 *
 * The caller fills a batch stream by stream, gives it device memory and runs it. Results stay until the batch is filled
 * again. Not thread-safe.
 */

/* Zero-initialise; release with dense_batch_free. */
typedef struct dense_batch {
    bytes sent;       /* sent to the device: tables, and payloads to be read */
    bytes streams;    /* device_encodings or device_decodings, sent next; addresses are offsets before */
    bytes results;    /* uint32_t each: bits of the payload written, or whether reading failed */
    uint64_t scratch; /* bytes behind `streams` */
    uint32_t count, max;
} dense_batch;

/*
 * Values of blocks, computed in device memory, each chain from its root on. The host follows a chain, reads and checks
 * its payloads, and entropy-decodes the lossy ones. It sends integers, steps, factors and dense symbol streams. The
 * device makes the blocks' values one after the other in their final place, and hashes them. Internal to engine/:
 * span_decode.c.
 *
 *   chain.c      collects what to send, block by block; any number of threads, each with its decoder
 *   chain_run.c  runs it on the device; one thread
 *
 * Addresses and sizes sent to a device come from records and decoded blocks, never from an unchecked payload. Kernels
 * that read dense streams stay inside them, whatever the streams contain.
 */

typedef enum chain_form {
    CHAIN_VALUES, /* values as they are */
    CHAIN_SAME,   /* the values of the link before */
    CHAIN_CAST,   /* the values of the link before, rounded to another dtype; at most once per chain */
    CHAIN_STREAM, /* a dense symbol stream */
    CHAIN_LINEAR, /* a lossy block of integers on a lattice */
    CHAIN_LEVELS  /* a lossy block of second moments: levels of rows and columns */
} chain_form;

/* Steps and factor of columns or rows, as offsets in the array that carries them. */
typedef struct chain_factor {
    size_t step, factor;
    uint64_t count; /* integers of the factor; 0: none */
    bool has_step;
    ckd_dtype dtype; /* dtype of the factor as sent: I8, F16 or F32 */
} chain_factor;

/* A side record, sent once for all chains of a run. */
typedef enum chain_side_kind { CHAIN_COLUMNS, CHAIN_ROWS, CHAIN_LEVEL_COLUMNS } chain_side_kind;
typedef struct chain_side {
    struct chain_side *next;
    hash128 content;
    chain_side_kind kind;
    bytes sent;
    chain_factor at;
    float *largest; /* largest magnitude, per component of the factor */
    /* Set by device_chains_run: where `sent` goes, and where the factor is widened to floats. */
    uint64_t base, wide;
} chain_side;
/* State shared by the chains of a run. */
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
    bool packed;     /* lossy: integers are sent packed; else all are 0 */
    size_t at;       /* offset of values or integers in `sent`, or of a stream in `streams` */
    size_t size;     /* size of the stream */
    uint64_t memory; /* device memory that reading the stream takes */
    /* Lossy: */
    uint64_t columns, phase, rows;
    uint32_t rank;       /* rank of the factors as sent, padded with zeros */
    lattice_run run;     /* linear */
    int32_t birth, step; /* levels */
    bool has_rows;
    size_t row; /* linear: a step per row; levels: integers */
    chain_factor right, left;
    chain_side *right_side, *left_side; /* NULL: right, left are the chain's own */
    uint32_t exceptions;
    size_t exception_at, exception_bits; /* at: u32 each; bits: in the values' dtype */
} chain_link;

/* The chain of one block. Zero-initialise; release with device_chain_free. */
typedef struct device_chain {
    const view_block *block;  /* set by the caller */
    chain_link *links;        /* from the root on */
    uint32_t count, capacity; /* count 0: a device cannot make the block */
    uint32_t cast;            /* index of the link that rounds; 0: none */
    bytes sent, streams;
    void *to;      /* device memory for the values, contiguous; set by the caller */
    bool mismatch; /* set by device_chains_run: the result is not what was saved */
    uint64_t base; /* set by device_chains_run */
    void *wide;    /* set by device_chains_run: values before they are rounded */
} device_chain;
void device_chain_free(device_chain *c);

/*
 * Collects what a device needs to make the values of the chain's block, one of `v`. Some links do not suit a device:
 * sparse or framed streams, other codings, wide integers, optimizer steps, or a parent in several blocks. The host
 * decodes such a link, with all links below it, and sends the values. If the block itself is such a link, count is 0,
 * and the caller uses device_chain_values. Errors: as block_values, for what the host decodes.
 */
ckd_status device_chain_make(device_chain *c, chain_sides *sides, decoder *d, const view *v, ckd_error *err);
/*
 * Returns memory for the block's values, which the caller decodes and verifies. Nothing else is sent then. NULL: out of
 * memory.
 */
void *device_chain_values(device_chain *c, ckd_error *err);
/*
 * Called when the values are in that memory. Sends f32 values as bf16, in half the size, if nearly all of them are
 * exact as bf16. Errors: NOMEM.
 */
ckd_status device_chain_filled(device_chain *c, ckd_error *err);

/*
 * Symbol streams of many blocks, planned from a device's counts and written there: the common part of deltas and
 * standalone blocks. Only payloads and nonzero counters come to the host.
 *
 * Device memory has two parts. The first holds integers, contexts and symbols, which stay. The second holds the rest
 * until all streams are planned. Payloads then take its place.
 */

typedef struct device_stream {
    bool dropped; /* will not be written */
    uint64_t count;
    const uint8_t *integers, *contexts; /* contexts NULL: all are 0 */
    uint8_t *symbols;
    bool split;      /* SPLIT instead of CLASS */
    unsigned bits;   /* SPLIT: number of bits below the symbols */
    uint64_t centre; /* centre of the integers; SPLIT: the bias */

    size_t counted;   /* offset of its counters (device_classes.entries) in the batch's `counted` */
    uint32_t entries; /* number of these counters */
    symbols_parts *parts;
    bytes head;      /* bytes before the payload */
    size_t planned;  /* size of the stream, in bytes, as the codec estimates it */
    uint32_t number; /* index in the dense batch */
} device_stream;

/* Zero-initialise; release with stream_batch_free. Not thread-safe, except for planning. */
typedef struct stream_batch {
    device_lease *lease;
    unsigned width;
    device_stream *streams;
    uint32_t count, max;
    /*
     * Bytes of all streams: `kept_bytes` in the first part of memory; in the second part `first` until they are
     * planned, and `payload_bytes` while payloads are written.
     */
    uint64_t kept_bytes, first, payload_bytes;
    uint8_t *memory, *next; /* next: free memory; first the rest of the first part, then the second part */
    bytes counted;
    dense_batch dense;
} stream_batch;

void stream_batch_free(stream_batch *b);
/* Empties the batch, for at most `max` streams of integers of `width` bytes. Errors: NOMEM. */
ckd_status stream_batch_clear(stream_batch *b, device_lease *lease, unsigned width, uint32_t max,
                              ckd_error *err);
/*
 * Adds a stream of `count` integers. stays, first: bytes that its owner takes besides, in the two parts. NULL: the
 * batch is full, or all would take more than `limit` bytes of device memory. The first stream is always accepted.
 */
device_stream *stream_batch_add(stream_batch *b, uint64_t count, uint64_t stays, uint64_t first,
                                uint64_t limit);
/* Errors of all these: DEVICE, NOMEM. Owners then take memory at b->next: all that stays, then the rest. */
ckd_status stream_batch_begin(stream_batch *b, ckd_error *err);
/* Takes memory at *at, and advances *at. Sizes are rounded up by stream_aligned. */
uint8_t *stream_take(uint8_t **at, uint64_t size);
uint64_t stream_aligned(uint64_t size);
/*
 * Finds `count` elements of the reader as an aligned contiguous array: in place, or gathered at *next, which then
 * advances.
 */
ckd_status device_contiguous(const uint8_t **out, const device_reader *r, uint8_t **next, uint64_t first,
                             uint64_t count, ckd_error *err);
/* Makes and counts symbols. Drops streams with far too many different ones (`dropped`). */
ckd_status stream_batch_count(stream_batch *b, ckd_error *err);
/* Returns the counters as a table, which the caller frees. NULL: out of memory. */
uint32_t *stream_counts(symbols_counts *c, const stream_batch *b, const device_stream *s);
/* Keeps the tables and the head planned in the workspace's slot. Drops the stream if memory is short. */
void stream_keep_plan(device_stream *s, symbols_workspace *w, int slot);
ckd_status stream_batch_write(stream_batch *b, ckd_error *err);
/* Fetches a whole stream; empty if it takes more than its integers. */
ckd_status stream_batch_read(stream_batch *b, const device_stream *s, bytes *to, ckd_error *err);

/*
 * Deltas of exact blocks, computed in batches in device memory: differences from the parent's values. stream_batch
 * writes their streams, byte for byte as the codec does.
 *
 *   begin     takes device memory; finds which of the parent's values are there already
 *   put       sends the others
 *   count     turns differences into classes and counts them
 *   plan      (per block, on any thread) makes tables
 */

typedef struct device_delta {
    uint64_t first, count;  /* elements of the reader; set by the caller */
    hash128 parent_content; /* content hash of the parent's values; set by the caller */
    device_stream *stream;  /* also dropped by the caller, and if another kind of stream may be better */
    bool parent_on_device;  /* the parent's values are on the device */
    const uint8_t *now, *previous;
    uint8_t *memory, *residual, *contexts; /* memory: for `previous` */
} device_delta;

/* Zero-initialise; release with device_deltas_free. */
typedef struct device_deltas {
    device_reader *r; /* f32, bf16 or f16 */
    ckd_dtype dtype;
    stream_batch *streams; /* the caller's; stream i belongs to block i */
    device_delta *blocks;
    uint32_t count, max;
} device_deltas;

void device_deltas_free(device_deltas *b);
/* Empties the batch, and sets its reader. Errors: NOMEM. */
ckd_status device_deltas_clear(device_deltas *b, stream_batch *streams, device_reader *r, ckd_dtype dtype,
                               uint32_t max, ckd_error *err);
/*
 * Adds a block if all blocks then take at most `max` bytes of device memory; always accepts the first one.
 * NULL: refused.
 */
device_delta *device_deltas_add(device_deltas *b, uint64_t first, uint64_t count, uint64_t max);

/* Errors of all these: DEVICE, NOMEM. */
ckd_status device_deltas_begin(device_deltas *b, ckd_error *err);
ckd_status device_deltas_put(device_deltas *b, device_delta *d, const void *previous, ckd_error *err);
ckd_status device_deltas_count(device_deltas *b, ckd_error *err);
void device_deltas_plan(const device_deltas *b, device_delta *d, symbols_workspace *w);
/* Fetches some of the block's differences: `size` bytes, `at` bytes from the first. */
ckd_status device_deltas_residual(const device_deltas *b, const device_delta *d, void *to, uint64_t at,
                                  uint64_t size, ckd_error *err);

/*
 * Weights that a device coded, kept in its memory as a decoder gives them. The next save is a delta on them, so it need
 * not decode them or send them to the device. Every user first compares their content hashes with the parent's, so a
 * reference may be old, but never wrong.
 */

typedef struct device_reference {
    struct device_reference *next;
    int device;
    ckd_dtype dtype;
    char *tensor;
    ckd_region region;
    uint64_t first, count; /* span of the region, in elements */
    void *memory;          /* device memory */
} device_reference;

/* Identifies a tensor and a span of it. The region is canonical. */
typedef struct device_reference_key {
    const char *tensor;
    ckd_dtype dtype;
    uint32_t ndim;
    region_span span;
} device_reference_key;

/* Takes the reference for the caller alone; device_reference_release returns it. NULL: there is none. */
device_reference *device_reference_acquire(ckd_store *store, int device, const device_reference_key *key);
void device_reference_release(ckd_store *store, device_reference *reference);
/*
 * Copies values in device memory, as they are after all work on the lease's queue, into a reference: *reference if the
 * caller has taken one, else the one with this key, else a new one within the store's limit (device_reference_bytes).
 * Returns when they are copied. *reference NULL: there is no room.
 */
ckd_status device_reference_keep(device_reference **reference, ckd_store *store, device_lease *lease,
                                 const device_reference_key *key, const void *values, ckd_error *err);
/* Frees the references of a store that is being closed. */
void device_references_close(ckd_store *store);

/*
 * Decodes a span of a tensor to its place in device memory, from blocks' chains, as many at a time as memory allows.
 * Blocks whose values lie scattered there are made elsewhere, and copied in stretches. Internal to engine/:
 * load/execute.c, save/parent.c.
 */

#define SPAN_RUNS_MAX \
    1024u /* most stretches of a block that are wanted, if regions are cut in different ways */

/*
 * Prepares what to send for the block of `c`, with the worker's decoder: its chain (device_chain_make), or its values
 * (device_chain_values). values: only the latter will do. Several threads call it.
 */
typedef ckd_status (*span_decode_fn)(void *context, device_chain *c, chain_sides *sides, bool values,
                                     uint32_t worker, ckd_error *err);

/*
 * Place of a block's values in the span: `rows` stretches of `count` elements each. Stretch i goes from element from +
 * i * from_step of the block to element to + i * to_step of the span. rows 0: the stretches differ.
 */
typedef struct span_place {
    uint64_t from, to, count, rows, from_step, to_step;
} span_place;

/* Zero-initialise; the caller sets the fields up to memory_size. */
typedef struct span_decode {
    thread_pool *pool;
    device_lease *lease;
    const view_tensor *tensor;
    const region_span *span;
    uint8_t *data; /* in device memory; aligned to the element's size */
    span_decode_fn make;
    void *context;
    /* Approximate host memory for blocks in transit, in bytes; at least one block is accepted. */
    uint64_t staging;
    /* Device memory for arrays sent and scratch. NULL: the lease's memory, as much as necessary. */
    void *memory;
    uint64_t memory_size;
    /* Results: numbers of blocks that the device made, and of blocks whose values the host sent. */
    uint64_t decoded, sent;
    uint64_t copied; /* elements of the span that the blocks have */
    bool mismatch;   /* something is not as it was saved; `data` is undefined */
    /* Private: */
    const view_block **blocks; /* the current batch */
    device_chain *chains;
    span_place *places; /* one per block */
    size_t count;
    chain_sides sides;
    span_run runs[SPAN_RUNS_MAX];
} span_decode;

/*
 * Tells whether a device decodes blocks of the span faster than the host. Removes blocks that have no part of the span
 * from the list. Also false if a block has too many stretches, or `data` is not aligned.
 */
bool device_can_decode_span(span_decode *f, const view_block **blocks, size_t *count);
/*
 * Decodes the span; done when it returns. Errors: those of `make`; NOMEM, DEVICE, UNSUPPORTED (the backend
 * lacks an operation).
 */
ckd_status device_decode_span(span_decode *f, const view_block **blocks, size_t count, ckd_error *err);
/*
 * The same in steps, for all blocks at once: begin; make each block, on any threads; run, on one thread; end, in any
 * case. Without `memory`, span_decode_run neither calls `make` nor uses the pool, so the next span can be made
 * meanwhile. The values are there when it returns. Errors: as device_decode_span.
 */
ckd_status span_decode_begin(span_decode *f, const view_block **blocks, size_t count, ckd_error *err);
ckd_status span_decode_make(span_decode *f, size_t index, uint32_t worker, ckd_error *err);
ckd_status span_decode_run(span_decode *f, ckd_error *err);
void span_decode_end(span_decode *f);
/* Estimates the host memory of a block in transit. */
uint64_t span_decode_size(const view_block *b);

/*
 * Standalone exact blocks, coded in batches in device memory. Integers have their signs rotated to the end.
 * The host chooses the levels of rows and columns from sums. stream_batch writes the streams, byte for byte as
 * the codec does.
 */

typedef struct device_standalone {
    uint64_t first, count; /* elements of the reader; the caller sets them and the grid */
    symbols_grid grid;
    device_stream *stream;
    const uint8_t *now;
    uint8_t *integers, *contexts;
    symbols_splitting split;
    symbols_lines lines;
    size_t sums, levels; /* offsets of its lines in the batch's arrays */
    bool chosen;         /* levels are used */
} device_standalone;

/* Zero-initialise; release with device_standalones_free. */
typedef struct device_standalones {
    device_reader *r; /* f32, bf16 or f16 */
    ckd_dtype dtype;
    stream_batch *streams; /* the caller's; stream i belongs to block i */
    device_standalone *blocks;
    uint32_t count, max;
    bytes sums, levels;
} device_standalones;

void device_standalones_free(device_standalones *b);
/* Empties the batch, and sets its reader. Errors: NOMEM. */
ckd_status device_standalones_clear(device_standalones *b, stream_batch *streams, device_reader *r,
                                    ckd_dtype dtype, uint32_t max, ckd_error *err);
/*
 * Adds a block if all blocks then take at most `max` bytes of device memory; always accepts the first one.
 * NULL: refused.
 */
device_standalone *device_standalones_add(device_standalones *b, uint64_t first, uint64_t count,
                                          uint64_t max);
/* Turns values into counts of symbols. Errors: DEVICE, NOMEM. */
ckd_status device_standalones_count(device_standalones *b, symbols_workspace *w, ckd_error *err);
/* Plans the stream of one block; any thread may call it. */
void device_standalones_plan(const device_standalones *b, device_standalone *d, symbols_workspace *w);

#endif
