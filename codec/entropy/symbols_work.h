/* The workspace of the symbol coder, and the encoder's steps. Internal to codec/. */
#ifndef CODEC_SYMBOLS_WORK_H
#define CODEC_SYMBOLS_WORK_H

#include "base/bytes.h"
#include "codec/common/common.h"
#include "codec/entropy/symbols_format.h"
#include "codec/entropy/entropy.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/*
 * The changes of a sparse stream: pairs of a gap and a difference, range by range. They are the integers of an inner
 * dense stream, where the context is the range, plus 16 for differences. Only read, since change streams are faster.
 */
#define SYMBOLS_SPARSE     0x80u /* first byte of a sparse stream */
#define SYMBOLS_SPARSE_MAX 4     /* a decoder accepts at most one pair per this many elements */
typedef struct symbols_sparse {
    unsigned ranges;
    uint8_t range_end[SYMBOLS_MAX_TABLES];
    uint32_t count[SYMBOLS_MAX_TABLES]; /* pairs in each range */
    size_t pairs;
    uint8_t context[SYMBOLS_MAX_COUNT / SYMBOLS_SPARSE_MAX * 2]; /* of the dense stream */
    uint8_t integers[SYMBOLS_MAX_COUNT / SYMBOLS_SPARSE_MAX * 2 * 8];
} symbols_sparse;

#define SYMBOLS_RUNS    0x82u /* first byte of a run stream */
#define SYMBOLS_FEW_MIN 1024  /* with fewer elements, several headers do not pay */

/* The changes of a change stream, while it is written or read. */
#define SYMBOLS_CHANGES          0x83u /* first byte of a change stream */
#define SYMBOLS_CHANGES_MAX      2     /* a decoder accepts at most one change per this many elements */
#define SYMBOLS_CHANGES_WORTH    4     /* the encoder tries changes with at most one per this many */
#define SYMBOLS_LISTS            3
#define SYMBOLS_PLACES_MORE      4 /* places written behind the last one */
#define SYMBOLS_CHANGES_CAPACITY (SYMBOLS_MAX_COUNT / SYMBOLS_CHANGES_MAX)
/* Finds the elements of a list by their place in it. A word covers 64 of all elements. */
typedef struct symbols_members {
    uint64_t word[SYMBOLS_MAX_COUNT / 64];    /* one bit per element, set if it is in the list */
    uint32_t before[SYMBOLS_MAX_COUNT / 64];  /* list elements before the word */
    uint16_t word_of[SYMBOLS_MAX_COUNT + 64]; /* the word of each list element */
} symbols_members;
typedef struct symbols_changing {
    unsigned lists;
    uint8_t end[SYMBOLS_LISTS]; /* highest context of each list but the last, which covers all elements */
    size_t count, others;       /* nonzero integers; others: those that are not 1 or -1 */
    size_t begin, others_begin; /* start of the list being written */
    reader rest;                /* the unread part of the stream */
    symbols_members members;    /* of the list being read */
    /* places of changes; places of others among the changes */
    uint32_t at[SYMBOLS_CHANGES_CAPACITY + SYMBOLS_PLACES_MORE],
        other[SYMBOLS_CHANGES_CAPACITY + SYMBOLS_PLACES_MORE];
    uint32_t gap[SYMBOLS_CHANGES_CAPACITY], length[SYMBOLS_CHANGES_CAPACITY];
    uint8_t sign[SYMBOLS_CHANGES_CAPACITY / 8];
    /* reading: of all changes; writing: of the others */
    uint8_t values[(SYMBOLS_CHANGES_CAPACITY + 8) * 8];
    uint8_t other_values[SYMBOLS_CHANGES_CAPACITY * 8];
    uint8_t context[SYMBOLS_CHANGES_CAPACITY],
        all_contexts[SYMBOLS_CHANGES_CAPACITY]; /* of the others; of all changes */
} symbols_changing;

/*
 * A frame in front of the integers: the lowest bits that all of them share, and levels of rows and columns. The context
 * of an element is the sum of its two levels. A decoder accepts at most n / SYMBOLS_FRAMED_MAX levels.
 */
#define SYMBOLS_FRAMED        0x81u /* first byte of a framed stream */
#define SYMBOLS_FRAMED_MAX    8
#define SYMBOLS_FRAMED_HEADER 32u
typedef struct symbols_frame {
    uint64_t shared; /* value of the lowest `shift` bits of every integer */
    unsigned shift;
    /* element i is in row (phase + i) / columns, column (phase + i) % columns; columns = 0: no levels */
    uint32_t columns, phase, rows;
    uint8_t level[SYMBOLS_MAX_COUNT / SYMBOLS_FRAMED_MAX]; /* rows first, then columns */
} symbols_frame;

/* Sums of the rows, then of the columns (encoder). */
typedef struct symbols_level_sums {
    uint32_t sum[SYMBOLS_MAX_COUNT / SYMBOLS_FRAMED_MAX], count[SYMBOLS_MAX_COUNT / SYMBOLS_FRAMED_MAX];
    float mean[SYMBOLS_MAX_COUNT / SYMBOLS_FRAMED_MAX];
} symbols_level_sums;

/* A planned dense stream. */
typedef struct symbols_slot {
    symbols_header header;
    unsigned width;
    unsigned shift; /* number of lowest bits omitted from each integer */
    size_t count;
    size_t zeros;                                        /* integers whose finest symbol is 0 */
    uint64_t bits;                                       /* estimated bits of the payload */
    size_t bound;                                        /* largest size of the stream in bytes */
    uint8_t symbols[SYMBOLS_MAX_COUNT];                  /* finest symbol of each integer, before `remap` */
    uint8_t remap[SYMBOLS_MAX_TABLES][SYMBOLS_ALPHABET]; /* per table: from finest symbols to its own */
} symbols_slot;

/*
 * Counts of each symbol in each context, in two halves, so that equal neighbours increment different counters. All zero
 * outside the contexts first_context ... last_context.
 */
typedef struct symbols_histogram {
    uint32_t count[2][SYMBOLS_CONTEXTS * SYMBOLS_ALPHABET];
    unsigned first_context, last_context;
} symbols_histogram;

/* A state of the decoder: the value of its symbol, and the next state. */
typedef struct symbols_state {
    uint32_t base; /* added to the low bits, modulo 2^32 */
    uint16_t next; /* plus the state bits */
    uint8_t state_bits;
    uint8_t bits; /* state bits plus low bits */
} symbols_state;
typedef struct symbols_state_wide {
    uint64_t base;
    uint16_t next;
    uint8_t state_bits;
    uint8_t low_bits;
} symbols_state_wide;

/* A symbol of the encoder (as in FSE): the number of state bits to write, and where to look up the next state. */
typedef struct symbols_code {
    const uint16_t *next; /* indexed by (state >> number of bits) */
    uint32_t add_bits;    /* (state + add_bits) >> 16 is the number of state bits */
    uint32_t low_bits;
    uint64_t base; /* subtracted from the integer to get the low bits */
} symbols_code;

#define SYMBOLS_BINS 64 /* bins of symbols, for comparing contexts */

/* Ranges of contexts with the counts of their symbols. */
typedef struct symbols_groups {
    unsigned count;
    uint8_t end[SYMBOLS_CONTEXTS]; /* last context of each group */
    uint8_t row[SYMBOLS_CONTEXTS]; /* row in `merged` */
} symbols_groups;

/*
 * A planned stream: a dense one; a framed one, with its integers in a dense stream and its levels, if any, in another;
 * or a run or change stream, which is already encoded.
 */
typedef struct symbols_plan_slot {
    symbols_slot dense;
    bool is_framed, is_encoded;
    bytes encoded; /* owned by the workspace; reused by the next plan */
    size_t coded;  /* symbols_coded of the encoded stream */
    symbols_frame frame;
    symbols_slot inner; /* the levels, or parts of an encoded stream */
} symbols_plan_slot;

struct symbols_workspace {
    symbols_plan_slot plan[2];
    union {
        symbols_sparse decoding_sparse;
        symbols_frame decoding_frame;
        symbols_changing changing; /* of the stream being planned or decoded */
    };
    symbols_level_sums level_sums;
    uint8_t level_context[SYMBOLS_MAX_COUNT]; /* contexts of the elements, from levels */
    symbols_histogram histogram;
    symbols_header decoding;
    uint32_t merged[SYMBOLS_CONTEXTS][SYMBOLS_ALPHABET]; /* counts per group of contexts */
    uint32_t binned[SYMBOLS_CONTEXTS][SYMBOLS_BINS];     /* the counts in bins of symbols */
    uint32_t finer[SYMBOLS_CONTEXTS][SYMBOLS_ALPHABET];  /* `merged` before the classes were coarsened */
    symbols_table smaller[SYMBOLS_MAX_TABLES];           /* tables before their states were doubled */
    float log2_of[SYMBOLS_MAX_STATES + 1];
    symbols_code codes[SYMBOLS_MAX_TABLES][SYMBOLS_ALPHABET];
    /* pointers may begin in the first part, which is unused */
    uint16_t next_state[(SYMBOLS_MAX_TABLES + 1) * SYMBOLS_MAX_STATES];
    union {
        symbols_state narrow[SYMBOLS_MAX_TABLES * SYMBOLS_MAX_STATES];
        symbols_state_wide wide[SYMBOLS_MAX_TABLES * SYMBOLS_MAX_STATES];
    } states;
};

/* ---- dense streams: behave as the public functions (symbols_dense_plan.c, symbols_encode.c, symbols_decode.c) ---- */

/* Fills the slot, and the groups of contexts found. Returns the expected size in bytes. n >= 1. */
size_t symbols_dense_plan(symbols_workspace *w, symbols_slot *p, symbols_groups *groups, symbols_mode mode,
                          const symbols_input *in);
/* As symbols_dense_plan in CLASS, from counts; the slot's symbols stay unset. */
size_t symbols_counted_plan(symbols_workspace *w, symbols_slot *p, symbols_groups *groups,
                            const symbols_counts *counts);
/*
 * As symbols_dense_plan in SPLIT, with a frame. Omits the bits that all integers share, and uses levels as contexts (in
 * `level_context`), each only if it pays. *framed is false if neither pays.
 */
size_t symbols_framed_plan(symbols_workspace *w, symbols_slot *p, symbols_frame *frame, bool *framed,
                           const symbols_grid *grid, const symbols_input *in);
/* As symbols_framed_plan from counts; the slot's symbols stay unset. The frame already has the levels. */
size_t symbols_counted_framed_plan(symbols_workspace *w, symbols_slot *p, symbols_frame *frame, bool *framed,
                                   const symbols_counts *counts, const symbols_splitting *split);
size_t symbols_dense_encode(symbols_workspace *w, const symbols_slot *p, const void *values,
                            const uint8_t *context, void *to, size_t capacity);
ckd_status symbols_dense_decode(symbols_workspace *w, const symbols_output *out, const void *from,
                                size_t size, ckd_error *err);

/* Returns integer i of an array of integers of `width` bytes. */
CPU_INLINE uint64_t symbols_load(const uint8_t *values, unsigned width, size_t i) {
    switch (width) {
    case 1:
        return values[i];
    case 2:
        return load_le16(values + 2 * i);
    case 4:
        return load_le32(values + 4 * i);
    default:
        return load_le64(values + 8 * i);
    }
}

CPU_INLINE void symbols_store(uint8_t *values, unsigned width, size_t i, uint64_t v) {
    switch (width) {
    case 1:
        values[i] = (uint8_t)v;
        break;
    case 2: {
        /* A single store: compilers do not merge the two byte stores of base/bytes.h. */
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        uint16_t v16 = __builtin_bswap16((uint16_t)v);
#else
        uint16_t v16 = (uint16_t)v;
#endif
        memcpy(values + 2 * i, &v16, 2);
        break;
    }
    case 4:
        store_le32(values + 4 * i, (uint32_t)v);
        break;
    default:
        store_le64(values + 8 * i, v);
    }
}

/* As wire_put_varint, to memory; returns the offset of the end. */
static inline size_t symbols_put_varint(uint8_t *to, size_t at, uint64_t v) {
    for (; v >= 128; v >>= 7) {
        to[at++] = (uint8_t)(v | 128);
    }
    to[at++] = (uint8_t)v;
    return at;
}

/* ---- the elements in a range of contexts ---- */

/* Returns a mask of 64 symbols, with the bits of symbols in first ... last set. */
typedef uint64_t symbols_range_64(const uint8_t *symbols, uint8_t first, uint8_t last);

#if defined(__x86_64__)
CPU_INLINE uint64_t symbols_in_range_64(const uint8_t *symbols, uint8_t first, uint8_t last) {
    const __m128i low = _mm_set1_epi8((char)first), span = _mm_set1_epi8((char)(last - first));
    uint64_t mask = 0;
    for (unsigned i = 0; i < 4; i++) {
        __m128i x = _mm_sub_epi8(_mm_loadu_si128((const __m128i *)(const void *)(symbols + 16 * i)), low);
        uint64_t bits = (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_min_epu8(x, span), x));
        mask |= bits << (16 * i);
    }
    return mask;
}
CPU_AVX2 CPU_INLINE uint64_t symbols_in_range_avx2(const uint8_t *symbols, uint8_t first, uint8_t last) {
    const __m256i low = _mm256_set1_epi8((char)first), span = _mm256_set1_epi8((char)(last - first));
    uint64_t mask = 0;
    for (unsigned i = 0; i < 2; i++) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)(symbols + 32 * i));
        x = _mm256_sub_epi8(x, low);
        uint64_t bits = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_min_epu8(x, span), x));
        mask |= bits << (32 * i);
    }
    return mask;
}
CPU_AVX512 CPU_INLINE uint64_t symbols_in_range_avx512(const uint8_t *symbols, uint8_t first, uint8_t last) {
    const __m512i low = _mm512_set1_epi8((char)first), span = _mm512_set1_epi8((char)(last - first));
    return _mm512_cmple_epu8_mask(_mm512_sub_epi8(_mm512_loadu_si512(symbols), low), span);
}
#else
#define symbols_in_range_avx2   symbols_in_range_64
#define symbols_in_range_avx512 symbols_in_range_64
CPU_INLINE uint64_t symbols_in_range_64(const uint8_t *each, uint8_t first, uint8_t last) {
    uint64_t mask = 0;
    for (unsigned i = 0; i < 64; i++) {
        mask |= (uint64_t)((uint8_t)(each[i] - first) <= (uint8_t)(last - first)) << i;
    }
    return mask;
}
#endif

/*
 * As symbols_range_64, of the 64 bytes from `at` on. at < n; bytes beyond n are not in range. symbols NULL: all others
 * are.
 */
CPU_INLINE uint64_t symbols_in_range_by(symbols_range_64 *range_64, const uint8_t *symbols, size_t at,
                                        size_t n, uint8_t first, uint8_t last) {
    size_t left = n - at;
    uint64_t exist = left >= 64 ? UINT64_MAX : (UINT64_C(1) << left) - 1;
    if (!symbols || (first == 0 && last == 255)) {
        return exist;
    }
    if (left >= 64) {
        return range_64(symbols + at, first, last);
    }
    uint8_t padded[64] = {0};
    memcpy(padded, symbols + at, left);
    return range_64(padded, first, last) & exist;
}
CPU_INLINE uint64_t symbols_in_range(const uint8_t *symbols, size_t at, size_t n, uint8_t first,
                                     uint8_t last) {
    return symbols_in_range_by(symbols_in_range_64, symbols, at, n, first, last);
}

/* ---- sparse streams (symbols_sparse.c) ---- */

/* Stores the pairs in their elements. Returns false if a gap leads past the range's elements. */
bool symbols_scatter(const symbols_sparse *s, const symbols_output *out);
/*
 * Reads the bytes before the dense stream and sets the contexts of its integers. Returns false if they are invalid for
 * n elements.
 */
bool symbols_sparse_read(symbols_sparse *s, const uint8_t *from, size_t size, size_t n, size_t *used);

/* ---- run streams (symbols_runs.c) ---- */

/*
 * Replaces the content of `to` with the stream of n integers of 1, 2 or 4 bytes, of which `nonzeros` are not zero.
 * Returns false if it needs more than `limit` bytes, or on NOMEM.
 */
bool symbols_runs_encode(bytes *to, unsigned width, const void *values, size_t n, size_t nonzeros,
                         size_t limit);
bool symbols_runs_decode(unsigned width, void *values, size_t n, const uint8_t *from, size_t size);

/* ---- change streams (symbols_places.c, symbols_changes.c) ---- */

static inline size_t symbols_bytes_for(size_t bits) {
    return (bits + 7) / 8;
}

/* A list's range of contexts, and the contexts of all n elements. */
typedef struct symbols_listed {
    uint8_t first, last;
    const uint8_t *each;
    size_t n;
} symbols_listed;
/*
 * Replaces ascending places in a list by the elements at these places; count >= 1. Returns false if the list is too
 * short.
 */
typedef bool symbols_finder(uint32_t *at, size_t count, const symbols_listed *in, symbols_members *m);
/*
 * Returns the i-th finder that this processor supports, the fastest first; NULL: there are no more. All give the same
 * result.
 */
symbols_finder *symbols_finder_at(unsigned i);

/* Appends ascending places; count >= 1. Uses c->gap and c->length, as does symbols_take_places. */
void symbols_put_places(bytes *to, const uint32_t *place, size_t count, symbols_changing *c);
/* Reads `count` >= 1 ascending places below `limit`. Returns false if the stream is invalid. */
bool symbols_take_places(uint32_t *place, size_t limit, size_t count, symbols_changing *c, reader *from);

/*
 * Replaces the content of `to` with the stream of the integers whose symbol is not 0. The workspace has the histogram
 * of the symbols. The input has contexts, unless all integers are 0. slot: scratch. Returns false if too many integers
 * are not 0, or on NOMEM. Sets *coded to the number of integers that a decoder handles.
 */
bool symbols_changes_encode(bytes *to, size_t *coded, symbols_workspace *w, symbols_slot *slot,
                            const uint8_t *symbols, const symbols_input *in);
ckd_status symbols_changes_decode(symbols_workspace *w, const symbols_output *out, const void *from,
                                  size_t size, ckd_error *err);

/* ---- frames (symbols_frame.c, symbols_levels.c) ---- */

/* Finds the lowest bits that all integers share; n >= 1. */
void symbols_shared_bits(symbols_frame *f, unsigned width, const void *values, size_t n);
/* Restores the omitted shared bits, in place. */
void symbols_add_shared(const symbols_frame *f, unsigned width, void *values, size_t n);
/* Chooses levels from the symbols of n elements, a sample of `total`. Sets columns to 0 if levels do not pay. */
void symbols_choose_levels(symbols_frame *f, symbols_level_sums *s, const symbols_grid *grid,
                           const uint8_t *symbols, size_t n, size_t total);
/*
 * Computes the columns, phase and rows of n elements, a sample of `total`. Returns false if levels cannot pay for them.
 */
bool symbols_set_grid(uint32_t *columns, uint32_t *phase, uint32_t *rows, const symbols_grid *grid, size_t n,
                      size_t total);
/* Chooses the levels of a frame from the sums in `s` over its rows and columns. Returns false if levels do not pay. */
bool symbols_choose_counted_levels(symbols_frame *f, symbols_level_sums *s, uint64_t squares, size_t n);
/* Plans the stream of a frame's levels, if any. Returns the size of the frame. */
size_t symbols_plan_frame(symbols_workspace *w, symbols_plan_slot *p);
/* Sets the contexts of n elements. */
void symbols_fill_levels(uint8_t *context, const symbols_frame *f, size_t n);
/* Writes the frame, at most SYMBOLS_FRAMED_HEADER bytes. Returns its size. The stream of the levels follows it. */
size_t symbols_frame_write(const symbols_frame *f, size_t stream_size, uint8_t *to);
/* Reads a frame. Returns false if it is invalid for n elements of `width` bytes. */
bool symbols_frame_read(symbols_frame *f, size_t *stream_size, reader *from, unsigned width, size_t n);

/* ---- splitting integers (symbols_classify.c) ---- */

/*
 * `fine` of the finest classes, by the bits of the integers: their symbols fit a byte for both values of the top bit.
 */
#define SYMBOLS_FINE_8  3
#define SYMBOLS_FINE_16 2
#define SYMBOLS_FINE_32 1
#define SYMBOLS_FINE_64 0

/* Computes the finest CLASS symbols of values - centre. */
void symbols_classify(uint8_t *symbols, unsigned width, const void *values, uint64_t centre, size_t n);
/* Finds the smallest and the largest of n >= 1 unsigned integers. */
void symbols_range(uint64_t *low, uint64_t *high, unsigned width, const void *values, size_t n);
/* Computes SPLIT symbols: (value >> low_bits) - bias, which must be in 0 ... 255. low_bits < the integers' bits. */
void symbols_split(uint8_t *symbols, unsigned width, const void *values, unsigned low_bits, uint64_t bias,
                   size_t n);

/* ---- statistics (symbols_histogram.c, symbols_tables.c) ---- */

/* Sets the counts of contexts first ... last, 256 each; all others become 0. */
void symbols_set_counts(symbols_histogram *h, const uint32_t *counts, unsigned first, unsigned last);
/* Counts n symbols; context NULL: all in context 0. */
void symbols_count(symbols_histogram *h, const uint8_t *symbols, const uint8_t *context, size_t n);
/* Adds the 256 counts of a context to `to`; returns their sum. */
uint32_t symbols_counts_of(uint32_t *to, const symbols_histogram *h, unsigned context);

/* log2 of n, accurate to about 1e-3; 0 for 0. */
static inline float symbols_log2(const symbols_workspace *w, uint32_t n) {
    unsigned shift = n > SYMBOLS_MAX_STATES ? 20u - (unsigned)__builtin_clz(n) : 0;
    return w->log2_of[n >> shift] + (float)shift;
}

/* Merges neighbouring contexts until at most 16 groups remain and no further merge pays. */
void symbols_group(symbols_workspace *w, symbols_groups *groups, size_t n);
/* Estimates the bits of all symbols of a table. *table_bits: the estimated bits of the table itself. */
float symbols_table_bits(const symbols_workspace *w, const uint32_t *counts, uint32_t total,
                         float *table_bits);
/*
 * CLASS: chooses how fine the classes are and, for each group, the floor with the smallest result. The counts become
 * those of the symbols of each table.
 */
void symbols_choose_classes(symbols_workspace *w, symbols_slot *p, const symbols_groups *groups);
/*
 * Chooses the table size and fills the tables of the header. Returns the estimated bits of the payload without low
 * bits.
 */
double symbols_choose_tables(symbols_workspace *w, symbols_header *h, const symbols_groups *groups,
                             unsigned width, size_t n);

#endif
