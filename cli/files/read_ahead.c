/*
 * Reads the values of small tensors in large slices. A save takes tensors in an order of its own: all in turn, or each
 * weight with its moments. So a few places in the files are followed at a time. A slice is read ahead only if a read
 * begins where an earlier one ended.
 */
#include <stdlib.h>
#include <string.h>

#include "cli/output/output.h"
#include "cli/files/files.h"

#define PLACES      4u
#define AHEAD_BYTES (256u << 10)
#define FIRST_BYTES (8u << 10)  /* read at a place that may turn out not to be followed */
#define SMALL_BYTES (64u << 10) /* larger reads go to the caller's memory */

typedef struct place {
    const safetensors_file *file;
    uint64_t begin, end; /* of what it holds, in the file */
    uint64_t used;       /* the number of its last read */
    char *bytes;         /* AHEAD_BYTES */
} place;

struct cli_read_ahead {
    place places[PLACES];
    uint64_t reads;
    char memory[PLACES * AHEAD_BYTES];
};

cli_read_ahead *cli_read_ahead_new(void) {
    cli_read_ahead *a = malloc(sizeof(*a));
    if (a) {
        a->reads = 0;
        for (uint32_t i = 0; i < PLACES; i++) {
            a->places[i] = (place){.bytes = a->memory + i * AHEAD_BYTES};
        }
    }
    return a;
}

void cli_read_ahead_free(cli_read_ahead *a) {
    free(a);
}

/* Returns the place that has the beginning of a read, or ends there; else the one that was used least recently. */
static place *place_for(cli_read_ahead *a, const safetensors_file *file, uint64_t begin) {
    place *oldest = &a->places[0];
    for (uint32_t i = 0; i < PLACES; i++) {
        place *p = &a->places[i];
        if (p->file == file && begin >= p->begin && begin <= p->end) {
            return p;
        }
        oldest = p->used < oldest->used ? p : oldest;
    }
    oldest->begin = oldest->end = begin;
    oldest->file = NULL; /* nobody follows it yet */
    return oldest;
}

ckd_status cli_read_ahead_read(cli_read_ahead *a, const safetensors_file *file, uint64_t begin, void *to,
                               size_t size, ckd_error *err) {
    if (size > SMALL_BYTES) {
        return safetensors_read_bytes(file, begin, to, size, err);
    }
    place *p = place_for(a, file, begin);
    ckd_status status = CKD_OK;
    p->used = ++a->reads;
    if (begin + size > p->end) {
        uint64_t slice = p->file ? AHEAD_BYTES : FIRST_BYTES, left = file->size - begin;
        slice = slice < size ? size : slice;
        slice = slice < left ? slice : left;
        p->begin = p->end = begin;
        p->file = file;
        status = safetensors_read_bytes(file, begin, p->bytes, (size_t)slice, err);
        if (status != CKD_OK &&
            slice > size) { /* the requested bytes alone may be readable, or else the error names them */
            return safetensors_read_bytes(file, begin, to, size, err);
        }
        p->end += status == CKD_OK ? slice : 0;
    }
    if (status == CKD_OK) {
        memcpy(to, p->bytes + (begin - p->begin), size);
    }
    return status;
}
