/* Ranks, their coordinates, and their files. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/layout/parse.h"

void layout_coordinates(uint32_t at[LAYOUT_AXES], const layout *l, uint32_t rank) {
    memset(at, 0, LAYOUT_AXES * sizeof(*at));
    for (uint32_t i = l->axis_count; i-- > 0;) {
        at[i] = rank % l->axes[i].size;
        rank /= l->axes[i].size;
    }
}

uint32_t layout_rank(const layout *l, const uint32_t at[LAYOUT_AXES]) {
    uint32_t rank = 0;
    for (uint32_t i = 0; i < l->axis_count; i++) {
        rank = rank * l->axes[i].size + at[i];
    }
    return rank;
}

uint32_t layout_place(const layout_over *over, const layout *l, const uint32_t at[LAYOUT_AXES]) {
    uint32_t place = 0;
    for (uint32_t i = 0; i < over->count; i++) {
        place = place * l->axes[over->axes[i]].size + at[over->axes[i]];
    }
    return place;
}

layout_text layout_rank_text(const layout *l, uint32_t rank) {
    layout_text out;
    uint32_t at[LAYOUT_AXES];
    layout_coordinates(at, l, rank);
    size_t used = (size_t)snprintf(out.text, sizeof(out.text), "rank %u", rank);
    for (uint32_t i = 0; i < l->axis_count && used < sizeof(out.text) - 2; i++) {
        int n = snprintf(out.text + used, sizeof(out.text) - used, "%s%s=%u%s", i ? " " : " (",
                         l->axes[i].name, at[i], i + 1 == l->axis_count ? ")" : "");
        used += (size_t)n;
    }
    return out;
}

layout_text layout_shape_text(uint32_t ndim, const uint64_t *shape) {
    layout_text out = {"["};
    size_t used = 1;
    for (uint32_t d = 0; d < ndim && used < sizeof(out.text) - 24; d++) {
        used +=
            (size_t)snprintf(out.text + used, sizeof(out.text) - used, "%s%" PRIu64, d ? ", " : "", shape[d]);
    }
    snprintf(out.text + used, sizeof(out.text) - used, "]");
    return out;
}

/* ---- files ---- */

/* Reads digits at `text` if they are a number as the template would write it. Returns their count, or 0. */
static size_t read_digits(uint64_t *out, const char *text, uint32_t width) {
    size_t count = strspn(text, "0123456789");
    *out = 0;
    if (count < width || count > 18 || (count > width && count > 1 && text[0] == '0')) {
        return 0;
    }
    for (size_t i = 0; i < count; i++) {
        *out = *out * 10 + (uint64_t)(text[i] - '0');
    }
    return count;
}

/* Returns LAYOUT_NONE if the rest of the path does not match the template. */
static size_t match_path(const layout *l, const layout_path *file, const char *path) {
    const layout_template *t = &file->end;
    uint32_t at[LAYOUT_AXES];
    memcpy(at, file->at, sizeof(at));
    uint64_t rank = UINT64_MAX, value;
    for (size_t i = 0; i < t->count; i++) {
        const layout_item *item = &t->items[i];
        size_t length =
            item->kind == LAYOUT_TEXT ? strlen(item->text) : read_digits(&value, path, item->width);
        if (length == 0 || (item->kind == LAYOUT_TEXT && strncmp(path, item->text, length) != 0)) {
            return LAYOUT_NONE;
        }
        if (item->kind != LAYOUT_TEXT &&
            value >= (item->kind == LAYOUT_RANK ? l->world : l->axes[item->index].size)) {
            return LAYOUT_NONE;
        }
        if (item->kind == LAYOUT_RANK) {
            rank = value;
        } else if (item->kind == LAYOUT_AXIS) {
            at[item->index] = (uint32_t)value;
        }
        path += length;
    }
    return *path ? LAYOUT_NONE : rank != UINT64_MAX ? (size_t)rank : layout_rank(l, at);
}

size_t layout_rank_of_path(const layout *l, const char *path) {
    for (size_t i = 0; i < l->file_count; i++) {
        for (const char *at = path; at; at = strchr(at, '/')) {
            at += *at == '/';
            size_t rank = match_path(l, &l->files[i], at);
            if (rank != LAYOUT_NONE) {
                return rank;
            }
        }
    }
    return LAYOUT_NONE;
}

char *layout_path_of_rank(const layout *l, uint32_t rank) {
    char *text = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&text, &size);
    if (!to) {
        return NULL;
    }
    uint32_t at[LAYOUT_AXES];
    layout_coordinates(at, l, rank);
    if (l->file_count == 0) {
        fprintf(to, "rank%05u.safetensors", rank);
    }
    for (size_t i = 0; l->file_count && i < l->files[0].end.count; i++) {
        const layout_item *item = &l->files[0].end.items[i];
        if (item->kind == LAYOUT_TEXT) {
            fputs(item->text, to);
        } else {
            fprintf(to, "%0*u", (int)item->width, item->kind == LAYOUT_RANK ? rank : at[item->index]);
        }
    }
    bool failed = ferror(to) != 0;
    if (fclose(to) != 0 || failed) {
        free(text);
        return NULL;
    }
    return text;
}
