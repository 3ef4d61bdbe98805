/* Merging chunk files. Internal to engine/compact/gather.c and merge.c. */
#ifndef ENGINE_COMPACT_GATHER_H
#define ENGINE_COMPACT_GATHER_H

#include "engine/compact/compact.h"

/* A chunk file that a remaining checkpoint names. */
typedef struct merge_source {
    file_ref file;
    const manifest_entry *first; /* the first checkpoint that names it, by run and step */
    uint64_t live;               /* bytes that are read, approximately */
    bool is_owned;               /* by a listed checkpoint, or one in the trash */
    bool stays;                  /* an own file of one of the newest checkpoints, or of an empty one */
    bool is_asked;               /* a run that the limits allow names it */
    bool is_wasteful;
} merge_source;

typedef struct gathering {
    compaction *c;
    manifest_entry *const *order; /* sorted by run, then step */
    size_t count;
    merge_source *sources; /* sorted by id */
    size_t source_count;
    gathered_fn gathered;
    void *context;
} gathering;

/* Sources that are merged into one new file for each rank. */
typedef struct merge_set {
    gathering *g;
    merge_source *const *sources;
    size_t count;
    hash_set files;        /* ids of the sources */
    hash_set live;         /* records that are read */
    hash_set damaged;      /* positions of records that cannot be read */
    size_t damaged_before; /* entries of `damaged` at the start of this attempt */
    bool *excluded;        /* by index in g->order: reads damaged records, and stays as it is */
    file_ref *outputs;     /* the new files */
    size_t output_count;
} merge_set;

/* Identifies a record together with the file that holds it. */
uint64_t compact_record_hash(const chunk *c, const record *r);
/*
 * Copies the live records of the sources into new files, and publishes manifests that name these. Frees the members
 * of the set. Errors: as compact_gather.
 */
ckd_status compact_merge(merge_set *x, ckd_error *err);

#endif
