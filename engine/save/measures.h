/*
 * What a save finds out about the error of its values, on its way into the chunk file. Not for exact saves, which have none.
 * Internal to engine/; used by the thread that saves.
 */
#ifndef ENGINE_SAVE_MEASURES_H
#define ENGINE_SAVE_MEASURES_H

#include "codec/chunk/measures.h"

typedef struct save_measures {
    struct reported_measures *items; /* in the order they were told */
    size_t count, capacity;
    bytes scratch;
} save_measures; /* zero-initialise */

/*
 * The figures of one region of a tensor, as its blocks have it (canonical). May be told before or after the blocks are written, and
 * more than once: what is NaN the second time (nonfinite: 0) stays as it was. Errors: NOMEM.
 */
ckd_status measures_add(save_measures *m, const char *tensor, const ckd_region *region, uint32_t ndim,
                        const measures *figures, ckd_error *err);
/*
 * Into the save's file, behind its blocks; nothing, if none were told. Errors: INVALID (figures of a region that the file has no
 * blocks of), and those of chunk_writer_append.
 */
ckd_status measures_commit(save_measures *m, chunk_writer *w, const ckd_id *checkpoint, ckd_error *err);
void measures_free(save_measures *m);

#endif
