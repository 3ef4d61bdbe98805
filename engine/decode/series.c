/* Sorts blocks of several checkpoints into series, so that each is decoded after those that it builds on. */
#include <stdlib.h>

#include "engine/decode/decode.h"

/* Optimizer steps are predicted from tensors with these prefixes. */
static const struct {
    const char *prefix;
    uint32_t rank;
} moments[] = {{"exp_avg.", 0}, {"exp_avg_sq.", 1}, {"master.", 2}};

static void set_name(series_block *b) {
    b->name = b->block->record->tensor->name;
    b->rank = 3;
    for (size_t i = 0; i < sizeof(moments) / sizeof(*moments); i++) {
        size_t length = strlen(moments[i].prefix);
        if (strncmp(b->name, moments[i].prefix, length) == 0) {
            b->name += length;
            b->rank = moments[i].rank;
            return;
        }
    }
}

static int compare_numbers(uint64_t a, uint64_t b) {
    return (a > b) - (a < b);
}

/* 0: both are of the same series. */
static int by_series(const series_block *a, const series_block *b) {
    const record *x = a->block->record, *y = b->block->record;
    int order = strcmp(a->name, b->name);
    order = order || !x->region || !y->region ? order : memcmp(x->region, y->region, sizeof(*x->region));
    order = order ? order : compare_numbers(x->first, y->first);
    return order ? order : compare_numbers(x->count, y->count);
}

static int by_place(const void *a, const void *b) {
    const series_block *x = a, *y = b;
    int order = by_series(x, y);
    order = order ? order : compare_numbers(x->checkpoint, y->checkpoint);
    order = order ? order : compare_numbers(x->rank, y->rank);
    return order ? order : compare_numbers(x->tag, y->tag);
}

size_t block_series_sort(series_block *blocks, size_t *begins, size_t count) {
    size_t series = 0;
    for (size_t i = 0; i < count; i++) {
        set_name(&blocks[i]);
    }
    qsort(blocks, count, sizeof(*blocks), by_place);
    for (size_t i = 0; i < count; i++) {
        if (i == 0 || by_series(&blocks[i - 1], &blocks[i]) != 0) {
            begins[series++] = i;
        }
    }
    begins[series] = count;
    return series;
}
