/*
 * Change streams, for data with most differences zero. They hold the places of the changes (symbols_places.c) and their
 * values. Small floats change far more often than large ones, so elements with low contexts have lists of their own.
 * Most values are 1 or -1, which take one bit. The decoder returns the list of changes, which may be applied in place:
 * time grows with the changes, not with the integers.
 */
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "codec/common/common.h"
#include "codec/entropy/symbols_work.h"

#define LOW_SHARE 5     /* all lists but the last may hold one element in this many */
#define LIST_BITS 64.0f /* approximate bits of a list without its places */

static ckd_status corrupt(ckd_error *err, const char *what) {
    return err_corrupt(err, NULL, CKD_NO_OFFSET, "a change stream %s", what);
}

/* ---- lists: elements with low contexts, and all elements ---- */

/* Returns the approximate bits for the places of `changes` in `all` elements. */
static float list_bits(const symbols_workspace *w, uint32_t changes, uint32_t all) {
    if (changes == 0 || changes >= all) {
        return LIST_BITS;
    }
    uint32_t same = all - changes;
    float each = symbols_log2(w, all);
    return LIST_BITS + (float)changes * (each - symbols_log2(w, changes)) +
           (float)same * (each - symbols_log2(w, same));
}

/* Elements and changes of all contexts up to each context. */
typedef struct context_sums {
    uint32_t all[SYMBOLS_CONTEXTS], changed[SYMBOLS_CONTEXTS];
    unsigned first, last;
} context_sums;

static void sum_contexts(context_sums *sums, const symbols_workspace *w) {
    uint32_t all = 0, changed = 0;
    sums->first = w->histogram.first_context;
    sums->last = w->histogram.last_context;
    for (unsigned c = sums->first; c <= sums->last; c++) {
        uint32_t counts[SYMBOLS_ALPHABET] = {0};
        uint32_t here = symbols_counts_of(counts, &w->histogram, c);
        all += here;
        changed += here - counts[0];
        sums->all[c] = all;
        sums->changed[c] = changed;
    }
}

/* Returns the bits of the contexts above `low` up to `high`. low < 0: from the first context on. */
static float part_bits(const symbols_workspace *w, const context_sums *sums, int low, int high) {
    uint32_t all = low < 0 ? 0 : sums->all[low], changed = low < 0 ? 0 : sums->changed[low];
    return list_bits(w, sums->changed[high] - changed, sums->all[high] - all);
}

/*
 * Chooses the last context of each list but the last one. A list must save 1 % of the bits, and may hold only few
 * elements, since its contexts take time. The last list counts all elements, so that its places are found without
 * contexts; nearly all elements are above the lower lists anyway.
 */
static void choose_lists(symbols_changing *c, const symbols_workspace *w, size_t n) {
    context_sums sums;
    sum_contexts(&sums, w);
    int first = (int)sums.first, last = (int)sums.last;
    c->lists = 1;
    float best = part_bits(w, &sums, -1, last), limit = best * 0.99f;
    int one = -1, two = -1;
    for (int k = first; k < last && sums.all[k] <= n / LOW_SHARE; k++) {
        float bits =
            part_bits(w, &sums, -1, k) + list_bits(w, sums.changed[last] - sums.changed[k], (uint32_t)n);
        one = bits < limit && bits < best ? k : one;
        best = bits < limit && bits < best ? bits : best;
    }
    if (one < 0) {
        return;
    }
    c->lists = 2;
    c->end[0] = (uint8_t)one;
    limit = best * 0.99f;
    for (int k = first; k < last && sums.all[k] <= n / LOW_SHARE; k++) {
        int low = k < one ? k : one, high = k < one ? one : k;
        float bits = part_bits(w, &sums, -1, low) + part_bits(w, &sums, low, high) +
                     list_bits(w, sums.changed[last] - sums.changed[high], (uint32_t)n);
        two = k != one && bits < limit && bits < best ? k : two;
        best = k != one && bits < limit && bits < best ? bits : best;
    }
    if (two >= 0) {
        c->lists = 3;
        c->end[0] = (uint8_t)(two < one ? two : one);
        c->end[1] = (uint8_t)(two < one ? one : two);
    }
}

static uint8_t begin_of(const symbols_changing *c, unsigned list) {
    return list ? (uint8_t)(c->end[list - 1] + 1) : 0;
}

/* Returns the position of the k-th set bit, counted from 0. It must exist. */
typedef unsigned select_bit(uint64_t bits, unsigned k);

static inline unsigned select_by_loop(uint64_t bits, unsigned k) {
    for (; k > 0; k--) {
        bits &= bits - 1;
    }
    return (unsigned)__builtin_ctzll(bits);
}
#if defined(__x86_64__)
CPU_AVX2 static inline unsigned select_by_deposit(uint64_t bits, unsigned k) {
    return (unsigned)__builtin_ctzll(_pdep_u64(UINT64_C(1) << k, bits));
}
#else
#define select_by_deposit select_by_loop
#endif

/*
 * Finds the elements of the list up to place `last`, word by word. Each word writes 64 entries of word_of, and the next
 * word overwrites the surplus. So no branch depends on the number of elements in a word. Returns false if the list is
 * shorter.
 */
CPU_INLINE bool find_members(symbols_members *m, uint32_t last, const symbols_listed *in,
                             symbols_range_64 *range_64) {
    const symbols_listed all = *in;
    uint32_t passed = 0;
    for (size_t begin = 0, word = 0; begin < all.n && passed <= last; begin += 64, word++) {
        m->word[word] = symbols_in_range_by(range_64, all.each, begin, all.n, all.first, all.last);
        m->before[word] = passed;
        uint16_t *mark = m->word_of + passed;
        for (unsigned i = 0; i < 64; i++) {
            mark[i] = (uint16_t)word;
        }
        passed += (uint32_t)__builtin_popcountll(m->word[word]);
    }
    return passed > last;
}

/*
 * Replaces ascending places in a list (other than the last) by the elements at these places. Returns false if the list
 * is too short.
 */
CPU_INLINE bool find_elements(uint32_t *at, size_t count, const symbols_listed *in, symbols_members *m,
                              symbols_range_64 *range_64, select_bit *select) {
    if (!find_members(m, at[count - 1], in, range_64)) {
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        unsigned word = m->word_of[at[i]];
        at[i] = 64 * word + select(m->word[word], at[i] - m->before[word]);
    }
    return true;
}

CPU_AVX2 static bool find_elements_avx2(uint32_t *at, size_t count, const symbols_listed *in,
                                        symbols_members *m) {
    return find_elements(at, count, in, m, symbols_in_range_avx2, select_by_deposit);
}
CPU_AVX512 static bool find_elements_avx512(uint32_t *at, size_t count, const symbols_listed *in,
                                            symbols_members *m) {
    return find_elements(at, count, in, m, symbols_in_range_avx512, select_by_deposit);
}
static bool find_elements_plain(uint32_t *at, size_t count, const symbols_listed *in, symbols_members *m) {
    return find_elements(at, count, in, m, symbols_in_range_64, select_by_loop);
}

symbols_finder *symbols_finder_at(unsigned i) {
    symbols_finder *found[3];
    unsigned n = 0;
    if (cpu_has_avx512()) {
        found[n++] = find_elements_avx512;
    }
    if (cpu_has_avx2()) {
        found[n++] = find_elements_avx2;
    }
    found[n++] = find_elements_plain;
    return i < n ? found[i] : NULL;
}

/* ---- writing ---- */

static bool add_change(symbols_changing *c, size_t i, uint32_t place, const symbols_input *in) {
    const uint64_t mask = UINT64_MAX >> (64 - 8 * in->width), negative = mask - (mask >> 2);
    if (c->count == in->n / SYMBOLS_CHANGES_WORTH) {
        return false;
    }
    uint64_t value = symbols_load(in->values, in->width, i);
    if (value >= negative) {
        c->sign[c->count / 8] |= (uint8_t)(1u << c->count % 8);
        value = (0 - value) & mask;
    }
    if (value != 1) {
        symbols_store(c->values, in->width, c->others, value);
        c->context[c->others] = in->context[i];
        c->other[c->others++] = (uint32_t)(c->count - c->begin);
    }
    c->at[c->count++] = place;
    return true;
}

/*
 * Lists the changes of one list. A small negative value is negated, and its sign is noted. A value that is then not 1
 * goes to the others. Returns false if there are too many changes.
 */
static bool gather(symbols_changing *c, unsigned list, const uint8_t *symbols, const symbols_input *in) {
    const bool low = list + 1u < c->lists;
    const uint8_t first = begin_of(c, list), last = low ? c->end[list] : SYMBOLS_CONTEXTS - 1;
    uint32_t before = 0;
    bool few = true;
    c->begin = c->count;
    c->others_begin = c->others;
    for (size_t at = 0; at < in->n && few; at += 64) {
        uint64_t changed = symbols_in_range(symbols, at, in->n, 1, 255) &
                           symbols_in_range(in->context, at, in->n, first, last);
        /* the last list counts all elements */
        uint64_t members = symbols_in_range(in->context, at, in->n, low ? first : 0, last);
        for (; changed && few; changed &= changed - 1) {
            uint64_t lower = (changed & (0 - changed)) - 1;
            uint32_t place = before + (uint32_t)__builtin_popcountll(members & lower);
            few = add_change(c, at + (unsigned)__builtin_ctzll(changed), place, in);
        }
        before += (uint32_t)__builtin_popcountll(members);
    }
    return few;
}

static void put_list(bytes *to, symbols_changing *c) {
    size_t count = c->count - c->begin, others = c->others - c->others_begin;
    wire_put_varint(to, count);
    if (count) {
        symbols_put_places(to, c->at + c->begin, count, c);
        wire_put_varint(to, others);
    }
    if (others) {
        symbols_put_places(to, c->other + c->others_begin, others, c);
    }
}

static bool put_others(bytes *to, symbols_workspace *w, symbols_slot *slot, unsigned width) {
    symbols_changing *c = &w->changing;
    symbols_input others = {width, c->others, c->values, c->context};
    symbols_groups unused;
    symbols_dense_plan(w, slot, &unused, SYMBOLS_CLASS, &others);
    size_t at = to->size;
    uint8_t *stream = bytes_extend(to, slot->bound);
    size_t size = stream ? symbols_dense_encode(w, slot, c->values, c->context, stream, slot->bound) : 0;
    to->size = at + size;
    return size > 0;
}

bool symbols_changes_encode(bytes *to, size_t *coded, symbols_workspace *w, symbols_slot *slot,
                            const uint8_t *symbols, const symbols_input *in) {
    symbols_changing *c = &w->changing;
    if (to->failed) {
        bytes_free(to);
    }
    bytes_clear(to);
    choose_lists(c, w, in->n);
    memset(c->sign, 0, sizeof(c->sign));
    c->count = c->others = 0;
    bytes_put_u8(to, SYMBOLS_CHANGES);
    bytes_put_u8(to, (uint8_t)c->lists);
    for (unsigned list = 0; list + 1 < c->lists; list++) {
        bytes_put_u8(to, c->end[list]);
    }
    for (unsigned list = 0; list < c->lists; list++) {
        if (!gather(c, list, symbols, in)) {
            return false;
        }
        put_list(to, c);
    }
    bytes_put(to, c->sign, symbols_bytes_for(c->count));
    *coded = c->count + c->others;
    return (!c->others || put_others(to, w, slot, in->width)) && !to->failed;
}

/* ---- reading ---- */

symbols_listing symbols_lists_changes(const void *from, size_t size) {
    const uint8_t *stream = from;
    if (size < 2 || stream[0] != SYMBOLS_CHANGES) {
        return SYMBOLS_ALL_INTEGERS;
    }
    return stream[1] > 1 ? SYMBOLS_CHANGES_BY_CONTEXT : SYMBOLS_CHANGES_ALONE;
}

static bool take_header(symbols_changing *c, reader *from) {
    bool known = reader_u8(from) == SYMBOLS_CHANGES;
    c->lists = reader_u8(from);
    c->count = c->others = 0;
    if (!known || c->lists < 1 || c->lists > SYMBOLS_LISTS) {
        return false;
    }
    for (unsigned list = 0; list + 1 < c->lists; list++) {
        c->end[list] = reader_u8(from);
        if (c->end[list] == SYMBOLS_CONTEXTS - 1 || (list && c->end[list] <= c->end[list - 1])) {
            return false;
        }
    }
    return !from->failed;
}

/* Reads one list: its changes, and the others among them. */
static bool take_list(symbols_changing *c, unsigned list, size_t n, const uint8_t *context, reader *from) {
    uint32_t *at = c->at + c->count, *other = c->other + c->others;
    size_t count = (size_t)wire_varint_max(from, n / SYMBOLS_CHANGES_MAX - c->count);
    if (count == 0) {
        return !from->failed;
    }
    if (!symbols_take_places(at, n, count, c, from)) {
        return false;
    }
    if (list + 1u < c->lists) {
        const symbols_listed in = {begin_of(c, list), c->end[list], context, n};
        if (!symbols_finder_at(0)(at, count, &in, &c->members)) {
            return false;
        }
    }
    size_t others = (size_t)wire_varint_max(from, count);
    if (others && !symbols_take_places(other, count, others, c, from)) {
        return false;
    }
    for (size_t i = 0; i < others; i++) {
        other[i] += (uint32_t)c->count;
    }
    c->count += count;
    c->others += others;
    return !from->failed;
}

ckd_status symbols_find_changes(symbols_changes *out, symbols_workspace *w, const symbols_stream *stream,
                                const uint8_t *context, ckd_error *err) {
    symbols_changing *c = &w->changing;
    unsigned width = stream->width;
    if (stream->n == 0 || stream->n > SYMBOLS_MAX_COUNT ||
        (width != 1 && width != 2 && width != 4 && width != 8)) {
        return err_set(err, CKD_E_INVALID, "a symbol stream cannot have %zu integers of %u bytes", stream->n,
                       width);
    }
    c->rest = reader_of(stream->data, stream->size);
    if (!take_header(c, &c->rest)) {
        return corrupt(err, "has an invalid header");
    }
    if (c->lists > 1 && !context) {
        return corrupt(err, "needs contexts, and the block has none");
    }
    for (unsigned list = 0; list < c->lists; list++) {
        if (!take_list(c, list, stream->n, context, &c->rest)) {
            return corrupt(err, "has invalid positions");
        }
    }
    *out = (symbols_changes){width, c->count, c->at, c->values};
    return CKD_OK;
}

/* Sets all values to 1 or -1. Writes up to seven values more than `count`. */
CPU_INLINE void fill_signs(uint8_t *values, unsigned width, size_t count, const uint8_t *sign) {
    for (size_t i = 0; i < count; i += 8) {
        for (unsigned j = 0; j < 8; j++) {
            symbols_store(values, width, i + j, 1 - 2 * (uint64_t)(sign[i / 8] >> j & 1));
        }
    }
}

CPU_PLAIN static void fill(uint8_t *values, unsigned width, size_t count, const uint8_t *sign) {
    switch (width) {
    case 1:
        fill_signs(values, 1, count, sign);
        break;
    case 2:
        fill_signs(values, 2, count, sign);
        break;
    case 4:
        fill_signs(values, 4, count, sign);
        break;
    default:
        fill_signs(values, 8, count, sign);
    }
}

/* Decodes the values that are not 1 or -1, and puts them in their places. */
static ckd_status read_others(const symbols_changes *changes, symbols_workspace *w, const uint8_t *sign,
                              const uint8_t *context, ckd_error *err) {
    symbols_changing *c = &w->changing;
    for (size_t i = 0; context && i < c->others; i++) {
        c->context[i] = context[c->other[i]];
    }
    const symbols_output out = {changes->width, c->others, c->other_values, context ? c->context : NULL};
    ckd_status status = symbols_dense_decode(w, &out, c->rest.data + c->rest.at, reader_left(&c->rest), err);
    for (size_t i = 0; status == CKD_OK && i < c->others; i++) {
        uint32_t at = c->other[i];
        uint64_t value = symbols_load(c->other_values, changes->width, i);
        symbols_store(c->values, changes->width, at, sign[at / 8] >> at % 8 & 1 ? 0 - value : value);
    }
    return status;
}

ckd_status symbols_read_changes(const symbols_changes *changes, symbols_workspace *w, const uint8_t *context,
                                ckd_error *err) {
    symbols_changing *c = &w->changing;
    const uint8_t *sign = reader_take(&c->rest, symbols_bytes_for(c->count));
    if (!sign || (c->count % 8 && sign[c->count / 8] >> c->count % 8)) {
        return corrupt(err, "ends within its signs, or has too many");
    }
    fill(c->values, changes->width, c->count, sign);
    if (c->others) {
        return read_others(changes, w, sign, context, err);
    }
    return reader_left(&c->rest) == 0 ? CKD_OK : corrupt(err, "does not end where it should");
}

ckd_status symbols_changes_decode(symbols_workspace *w, const symbols_output *out, const void *from,
                                  size_t size, ckd_error *err) {
    symbols_changing *c = &w->changing;
    symbols_changes changes;
    const symbols_stream stream = {out->width, out->n, from, size};
    ckd_status status = symbols_find_changes(&changes, w, &stream, out->context, err);
    for (size_t i = 0; status == CKD_OK && out->context && i < c->count; i++) {
        c->all_contexts[i] = out->context[c->at[i]];
    }
    THEN(status, symbols_read_changes(&changes, w, out->context ? c->all_contexts : NULL, err));
    if (status == CKD_OK) {
        memset(out->values, 0, out->n * out->width);
        for (size_t i = 0; i < c->count; i++) {
            symbols_store(out->values, out->width, c->at[i], symbols_load(c->values, out->width, i));
        }
    }
    return status;
}
