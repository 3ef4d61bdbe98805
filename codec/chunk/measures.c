/*
 * The measures record of a chunk file: error figures of each shard, in few bytes. They only inform, so no value depends
 * on them. codec/FORMAT.md, "Measures".
 */
#include "codec/chunk/chunk.h"

#include <float.h>
#include <stdlib.h>

#include "codec/chunk/record_wire.h"
#include "codec/common/common.h"

#define FIGURES      5u /* in every table */
#define MORE_FIGURES 2u /* after those, in tables that have them */
#define ALL_FIGURES  (FIGURES + MORE_FIGURES)
/* the upper two of the four bytes of an f32: eight significant bits */
#define FIGURE_BYTES  2u
#define NOT_KNOWN     UINT32_C(0x7fc00000)
#define INFINITE      UINT32_C(0x7f800000)
#define MEASURES_ZSTD 9

/* ---- figures ---- */

#define MAX_ERROR 2u /* indices of the figures that are rounded up */
#define UPDATE    6u
#define SQUARES   2u /* the first two figures are sums of squares */

/* Returns the field with this index in the format. */
static double *figure_of(measures *m, unsigned which) {
    double *const all[ALL_FIGURES] = {
        &m->error_squares, &m->value_squares, &m->max_error, &m->direction_change,
        &m->movement,      &m->update_given,  &m->update};
    return all[which];
}

/*
 * Returns the bits of an f32 near v, with zeros below the highest FIGURE_BYTES. A sum of squares that is too small for
 * that becomes unknown, since zero would mean that the values are exact.
 */
static uint32_t figure_bits(double v, unsigned which) {
    const bool up = which == MAX_ERROR || which == UPDATE;
    const uint32_t step = UINT32_C(1) << 8 * (4 - FIGURE_BYTES);
    float f = (float)v;
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    if (which < SQUARES && v > 0 && v < (double)FLT_MIN) {
        return NOT_KNOWN;
    }
    if (!(v >= 0) || bits >= INFINITE) {
        return v > 0 ? INFINITE : NOT_KNOWN;
    }
    bits += up && (double)f < v; /* the next float above */
    bits += up ? step - 1 : step / 2;
    return bits & ~(step - 1);
}

static double figure_value(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof(f));
    return (double)f;
}

/* ---- the table ---- */

/* Without updates, writes the table that the first version can read. */
static unsigned more_figures(const measures_entry *entries, size_t count) {
    bool any = false;
    for (size_t i = 0; i < count && !any; i++) {
        any = entries[i].measures.update > 0 || entries[i].measures.update_given > 0;
    }
    return any ? MORE_FIGURES : 0;
}

void measures_encode(bytes *to, const measures_entry *entries, size_t count) {
    unsigned more = more_figures(entries, count);
    wire_put_varint(to, count);
    bytes_put_u8(to, (uint8_t)(FIGURE_BYTES | more << 4));
    for (size_t i = 0; i < count; i++) {
        wire_put_varint(to, entries[i].shard - (i ? entries[i - 1].shard + 1 : 0));
    }
    for (size_t i = 0; i < count; i++) {
        wire_put_varint(to, entries[i].measures.nonfinite);
    }
    for (unsigned which = 0; which < FIGURES + more; which++) {
        for (unsigned byte = 0; byte < FIGURE_BYTES; byte++) {
            for (size_t i = 0; i < count; i++) {
                measures m = entries[i].measures;
                uint32_t bits = figure_bits(*figure_of(&m, which), which);
                bytes_put_u8(to, (uint8_t)(bits >> (24 - 8 * byte)));
            }
        }
    }
}

/*
 * Reads the figures. Missing figures become unknown; those beyond ALL_FIGURES are skipped. Returns false if one is
 * negative.
 */
static bool take_figures(reader *in, measures_entry *entries, size_t count, unsigned figures,
                         unsigned bytes_each) {
    bool fine = true;
    const uint8_t *at = reader_take(in, figures * bytes_each * count);
    for (size_t i = 0; at && i < count; i++) {
        for (unsigned which = 0; which < ALL_FIGURES || which < figures; which++) {
            uint32_t bits = which < figures ? 0 : NOT_KNOWN;
            for (unsigned byte = 0; byte < bytes_each && which < figures; byte++) {
                bits |= (uint32_t)at[(which * bytes_each + byte) * count + i] << (24 - 8 * byte);
            }
            fine = fine && bits >> 31 == 0;
            if (which < ALL_FIGURES) {
                *figure_of(&entries[i].measures, which) = figure_value(bits);
            }
        }
    }
    return at && fine;
}

static bool take_shards(reader *in, measures_entry *entries, size_t count) {
    uint64_t next = 0;
    for (size_t i = 0; i < count && !in->failed; i++) {
        uint64_t shard;
        if (!size_add(&shard, next, wire_varint(in)) || shard == UINT64_MAX) {
            return false;
        }
        entries[i].shard = shard;
        next = shard + 1;
    }
    for (size_t i = 0; i < count && !in->failed; i++) {
        entries[i].measures.nonfinite = wire_varint(in);
    }
    return !in->failed;
}

ckd_status measures_decode(measures_entry **entries, size_t *count, const void *raw, size_t size,
                           const record_place *place, ckd_error *err) {
    reader in = reader_of(raw, size);
    *entries = NULL;
    *count = 0;
    size_t n = (size_t)wire_varint_max(&in, MEASURES_ENTRIES);
    unsigned head = reader_u8(&in), bytes_each = head & 15, figures = FIGURES + (head >> 4);
    if (in.failed || n == 0 || bytes_each < 2 || bytes_each > 4 ||
        n > reader_left(&in) / (2 + figures * bytes_each)) {
        return err_corrupt(err, place->path, place->offset,
                           "the table of measures is too short for its entries");
    }
    measures_entry *all = calloc(n, sizeof(*all));
    if (!all) {
        return err_nomem(err, n * sizeof(*all), "measures");
    }
    if (!take_shards(&in, all, n) || !take_figures(&in, all, n, figures, bytes_each) ||
        reader_left(&in) != 0) {
        free(all);
        return err_corrupt(err, place->path, place->offset, "the table of measures is invalid");
    }
    *entries = all;
    *count = n;
    return CKD_OK;
}

/* ---- the record ---- */

static ckd_status append_record(chunk_writer *w, const ckd_id *checkpoint, const bytes *raw,
                                const bytes *packed, ckd_error *err) {
    bool smaller = packed->size < raw->size;
    ckd_region whole = {.kind = CKD_REGION_WHOLE};
    record_tensor tensor = {.name = MEASURES_NAME, .checkpoint = *checkpoint, .role = CKD_ROLE_OTHER};
    record r = {.kind = RECORD_MEASURES,
                .coding = smaller, /* zstd or raw */
                .tensor = &tensor,
                .region = &whole,
                .raw_size = raw->size,
                .stored_size = smaller ? packed->size : raw->size,
                .content = content_hash(raw->data, raw->size)};
    return chunk_writer_append(w, &r, smaller ? packed->data : raw->data, err);
}

ckd_status measures_write(chunk_writer *w, const ckd_id *checkpoint, const measures_entry *entries,
                          size_t count, ckd_error *err) {
    if (count == 0) {
        return CKD_OK;
    }
    bytes raw = {0}, packed = {0};
    measures_encode(&raw, entries, count);
    size_t bound = raw.failed ? 0 : zstd_once_bound(raw.size);
    void *to = bound ? bytes_extend(&packed, bound) : NULL;
    packed.size = to ? zstd_once_pack(to, bound, raw.data, raw.size, MEASURES_ZSTD) : 0;
    ckd_status status = packed.size == 0 ? err_nomem(err, bound, "a table of measures")
                                         : append_record(w, checkpoint, &raw, &packed, err);
    bytes_free(&raw);
    bytes_free(&packed);
    return status;
}

static ckd_status unpack(void *raw, const record *r, const void *stored, const char *path, ckd_error *err) {
    if (r->coding > 1) {
        return err_unsupported(err, path, r->offset,
                               "the measures have coding %u, which this version does not know",
                               (unsigned)r->coding);
    }
    if (r->coding == 0 && r->stored_size == r->raw_size) {
        memcpy(raw, stored, r->raw_size);
        return CKD_OK;
    }
    ckd_status status =
        r->coding == 1 ? zstd_once_unpack(raw, r->raw_size, stored, r->stored_size) : CKD_E_CORRUPT;
    if (status == CKD_E_NOMEM) {
        return err_nomem(err, r->raw_size, "decompressing measures");
    }
    return status == CKD_OK
               ? CKD_OK
               : err_corrupt(err, path, r->offset, "the measures do not decompress to their size");
}

ckd_status measures_read(measures_entry **entries, size_t *count, const chunk *c, const record *r,
                         ckd_error *err) {
    const char *path = file_path(c->file);
    bytes stored = {0}, raw = {0};
    *entries = NULL;
    *count = 0;
    void *from = bytes_scratch(&stored, r->stored_size, "measures", err);
    void *to = from ? bytes_scratch(&raw, r->raw_size, "measures", err) : NULL;
    ckd_status status = to ? chunk_read_payload(c, r, from, err) : CKD_E_NOMEM;
    THEN(status, unpack(to, r, from, path, err));
    hash128 content = status == CKD_OK ? content_hash(to, r->raw_size) : (hash128){{0}};
    if (status == CKD_OK && !wire_content_matches(&r->content, &content)) {
        status = err_corrupt(err, path, r->offset,
                             "the measures do not have the content hash they were saved with");
    }
    THEN(status, measures_decode(entries, count, to, r->raw_size, &(record_place){path, r->offset}, err));
    bytes_free(&stored);
    bytes_free(&raw);
    return status;
}
