/* Memory that decoded records point to: pieces of growing size, freed together. */
#include <stdlib.h>
#include <string.h>

#include "codec/chunk/record.h"

#define PIECE_MIN 4096u
#define PIECE_MAX (1u << 20)
#define ALIGNMENT 16u

static bool add_piece(record_arena *a, size_t at_least) {
    if (ARRAY_GROW(a->pieces, a->capacity, a->count + 1, "records", NULL) != CKD_OK) {
        return false;
    }
    /* Each piece is twice the last one. So small files stay small, and the number of pieces stays low. */
    size_t room = a->room < PIECE_MIN / 2 ? PIECE_MIN : a->room < PIECE_MAX / 2 ? 2 * a->room : PIECE_MAX;
    if (room < at_least) {
        room = at_least;
    }
    void *piece = calloc(1, room);
    if (!piece) {
        return false;
    }
    a->pieces[a->count++] = piece;
    a->used = 0;
    a->room = room;
    return true;
}

void *arena_alloc(record_arena *a, size_t size) {
    if (size > SIZE_MAX - ALIGNMENT) {
        return NULL;
    }
    size = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (a->count == 0 || a->room - a->used < size) {
        if (!add_piece(a, size)) {
            return NULL;
        }
    }
    void *out = (char *)a->pieces[a->count - 1] + a->used;
    a->used += size;
    return out;
}

void arena_clear(record_arena *a) {
    if (a->count == 0) {
        return;
    }
    void *last = a->pieces[--a->count];
    for (size_t i = 0; i < a->count; i++) {
        free(a->pieces[i]);
    }
    memset(last, 0, a->used);
    a->pieces[0] = last;
    a->count = 1;
    a->used = 0;
}

void arena_free(record_arena *a) {
    for (size_t i = 0; i < a->count; i++) {
        free(a->pieces[i]);
    }
    free(a->pieces);
    *a = (record_arena){0};
}
