/*
 * Collects figures of a save's values, which go into the chunk file: their errors, and how many are not finite. An
 * exact region has figures only if it has such values. Internal to engine/; one thread at a time.
 */
#ifndef ENGINE_SAVE_MEASURES_H
#define ENGINE_SAVE_MEASURES_H

#include "codec/chunk/chunk.h"

typedef struct save_measures {
    struct reported_measures *items; /* in order of arrival */
    size_t count, capacity;
    bytes scratch;
} save_measures; /* zero-initialise */

/*
 * Adds the figures of one region of a tensor, as its blocks have it (canonical). May be called before or after the
 * blocks are written, and more than once: NaN (nonfinite: 0) leaves an earlier figure unchanged. Errors: NOMEM.
 */
ckd_status measures_add(save_measures *m, const char *tensor, const ckd_region *region, uint32_t ndim,
                        const measures *figures, ckd_error *err);
/*
 * Adds values of an exact region that are not finite. Numbers for the same region are added up, as its blocks come one
 * after the other. Errors: NOMEM.
 */
ckd_status measures_add_nonfinite(save_measures *m, const char *tensor, const ckd_region *region,
                                  uint32_t ndim, uint64_t nonfinite, ckd_error *err);
/* Appends the reports of `from`, which is then empty. Errors: NOMEM. */
ckd_status measures_append(save_measures *m, save_measures *from, ckd_error *err);
/*
 * Writes the figures into the save's file, behind its blocks; nothing if there are none. Errors: INVALID (figures of
 * a region without blocks in the file), and those of chunk_writer_append.
 */
ckd_status measures_write_all(save_measures *m, chunk_writer *w, const ckd_id *checkpoint, ckd_error *err);
void measures_free(save_measures *m);

#endif
