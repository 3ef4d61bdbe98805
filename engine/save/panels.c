/*
 * Saves the panels of a large exact matrix. Values from a read function come by rows, and a panel needs a slice of
 * each. So the rows of many blocks are held, and the panels are saved from them one after the other: a band. A band has
 * as many rows as fit into the staging memory, and most matrices are a single band. The order of blocks, and so the
 * chunk file, is the same wherever the values are.
 */
#include <string.h>

#include "engine/device/device.h"
#include "engine/save/device.h"
#include "engine/save/internal.h"

#define HELD_SHARE 4                    /* held rows may take 1/HELD_SHARE of the staging limit */
#define HELD_MAX   (UINT64_C(64) << 20) /* bytes; more would not make reads any larger */
#define BAND_ROWS  512u                 /* a band has room for at least these; blocks have fewer rows */

uint64_t save_held_bytes(uint64_t staging) {
    return staging / HELD_SHARE < HELD_MAX ? staging / HELD_SHARE : HELD_MAX;
}

/* ---- values ---- */

/* Rows of some columns, as the read function gave them. */
typedef struct held_rows {
    uint8_t *values; /* NULL: none are held */
    uint64_t column, width;
    uint64_t first, end, max; /* rows held: first ... end - 1; max: room */
} held_rows;

typedef struct panel_source {
    const ckd_tensor *tensor;
    size_t element;
    const save_panel *panel;
    held_rows *held; /* NULL: all values are in the caller's memory, or a tile of them is read by itself */
} panel_source;

/* Reads further rows. Whole ones are read together. */
static ckd_status hold_rows(const panel_source *p, uint64_t end, ckd_error *err) {
    held_rows *h = p->held;
    uint64_t columns = p->panel->columns;
    ckd_status status = CKD_OK;
    while (h->end < end && status == CKD_OK) {
        uint64_t rows = h->width == columns ? end - h->end : 1;
        status = p->tensor->read(p->tensor->read_context, h->end * columns + h->column, rows * h->width,
                                 h->values + (h->end - h->first) * h->width * p->element, err);
        h->end += status == CKD_OK ? rows : 0;
    }
    return status;
}

/* Gets neighbouring elements of one row of the panel. */
static ckd_status read_slice(void *to, const panel_source *p, uint64_t row, uint64_t column, uint64_t count,
                             ckd_error *err) {
    const held_rows *h = p->held;
    uint64_t from = row * p->panel->columns + p->panel->first + column;
    if (h && h->values && row >= h->first && row < h->end) {
        uint64_t at = (row - h->first) * h->width + p->panel->first + column - h->column;
        memcpy(to, h->values + at * p->element, count * p->element);
    } else if (p->tensor->data) {
        memcpy(to, (const uint8_t *)p->tensor->data + from * p->element, count * p->element);
    } else {
        return p->tensor->read(p->tensor->read_context, from, count, to, err);
    }
    return CKD_OK;
}

static ckd_status read_panel(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err) {
    const panel_source *p = context;
    const held_rows *h = p->held;
    uint64_t width = p->panel->rows.width, end = (first + count + width - 1) / width;
    uint8_t *out = to;
    bool holds = h && h->values && first / width >= h->first && end - h->first <= h->max;
    ckd_status status = holds ? hold_rows(p, end, err) : CKD_OK;
    while (count && status == CKD_OK) {
        uint64_t row = first / width, column = first % width;
        uint64_t n = width - column < count ? width - column : count;
        status = read_slice(out, p, row, column, n, err);
        out += n * p->element;
        first += n;
        count -= n;
    }
    return status;
}

/* ---- panels ---- */

static ckd_status save_part(ckd_save *save, panel_source *from, uint64_t first, uint64_t end,
                            ckd_error *err) {
    const save_panel *panel = from->panel;
    ckd_tensor source = *from->tensor;
    source.data = NULL;
    source.read = read_panel;
    source.read_context = from;
    device_reader on_device;
    if (from->tensor->read == device_read) {
        on_device = device_reader_columns(from->tensor->read_context, panel->first, panel->rows.width,
                                          panel->columns);
        source.read = device_read;
        source.read_context = &on_device;
    }
    return save_exact_span(save, &(exact_span){&source, &panel->context, first, end}, NULL, err);
}

ckd_status save_exact_panel(ckd_save *save, const ckd_tensor *tensor, const save_panel *panel, uint64_t first,
                            uint64_t end, ckd_error *err) {
    panel_source from = {tensor, ckd_dtype_size(tensor->dtype), panel, NULL};
    return save_part(save, &from, first, end, err);
}

/*
 * Saves the blocks of a panel that lie in a band. A block that begins in its first row is saved even if it is longer.
 */
static ckd_status save_in_band(ckd_save *save, panel_source *from, save_panel *panel, ckd_error *err) {
    const held_rows *band = from->held;
    uint64_t elements, width = panel->rows.width, end = panel->next;
    region_count(&elements, &panel->context.shape, panel->context.region);
    while (end < elements) {
        uint64_t next = end + save_block_length(&panel->context, end, elements);
        bool must = end == panel->next && end / width == band->first;
        if (!must && next > (band->first + band->max) * width) {
            break;
        }
        end = next;
    }
    from->panel = panel;
    ckd_status status = end > panel->next ? save_part(save, from, panel->next, end, err) : CKD_OK;
    panel->next = end;
    return status;
}

/* Drops the rows that no panel needs any more. Returns false if all rows are saved. */
static bool next_band(held_rows *band, const save_panel *panels, size_t count, size_t element,
                      uint64_t rows) {
    uint64_t first = rows;
    for (size_t i = 0; i < count; i++) {
        uint64_t next = panels[i].next / panels[i].rows.width;
        first = next < first ? next : first;
    }
    uint64_t kept = band->end > first ? band->end - first : 0;
    if (kept && band->values) {
        uint64_t size = band->width * element;
        memmove(band->values, band->values + (first - band->first) * size, kept * size);
    }
    band->first = first;
    band->end = first + kept;
    return first < rows;
}

/* Returns how many neighbouring panels can be held together with enough rows. */
static size_t group_of(uint64_t *width, const save_panels *panels, size_t first, uint64_t limit) {
    size_t count = 0;
    *width = 0;
    while (first + count < panels->count &&
           (count == 0 || *width + panels->items[first + count].rows.width <= limit)) {
        *width += panels->items[first + count++].rows.width;
    }
    return count;
}

static ckd_status save_group_of_panels(ckd_save *save, panel_source *from, save_panel *panels, size_t count,
                                       uint64_t rows, ckd_error *err) {
    ckd_status status = CKD_OK;
    do {
        for (size_t i = 0; i < count && status == CKD_OK; i++) {
            status = save_in_band(save, from, &panels[i], err);
        }
    } while (status == CKD_OK && next_band(from->held, panels, count, from->element, rows));
    return status;
}

ckd_status save_in_panels(ckd_save *save, const ckd_tensor *tensor, const tensor_context *t, ckd_error *err) {
    save_panels panels;
    block_sides sides = save_exact_sides(save);
    uint64_t elements, room = save_held_bytes(save->coding.staging);
    size_t element = ckd_dtype_size(tensor->dtype), count = 0;
    ckd_status status = save_cut(&panels, save, t, &sides, &sides, err);
    region_count(&elements, &t->shape, t->region);
    for (size_t i = 0; i < panels.count && status == CKD_OK; i += count) {
        held_rows held = {.column = panels.items[i].first};
        panel_source from = {tensor, element, NULL, &held};
        uint64_t rows = elements / panels.items[i].columns;
        count = group_of(&held.width, &panels, i, room / BAND_ROWS / element);
        held.max = room / (held.width * element);
        held.max = held.max < 1 ? 1 : held.max < rows ? held.max : rows;
        bool fits = held.width * element <= room;
        /* if not even one row fits, values are read block by block */
        if (!tensor->data && tensor->read != device_read && fits) {
            held.values =
                bytes_scratch(&save->input.rows, held.max * held.width * element, "rows of a tensor", err);
            status = held.values ? CKD_OK : CKD_E_NOMEM;
        }
        THEN(status, save_group_of_panels(save, &from, &panels.items[i], count, rows, err));
    }
    save_panels_free(&panels);
    return status;
}
