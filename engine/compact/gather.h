/* Chunk files whose records are put together. Internal to engine/compact/gather.c and merge.c. */
#ifndef ENGINE_COMPACT_GATHER_H
#define ENGINE_COMPACT_GATHER_H

#include "engine/compact/compact.h"

/* A chunk file that something which stays names. */
typedef struct source {
    file_ref file;
    const manifest_entry *first; /* the first that names it, by run and step */
    uint64_t live;               /* bytes that are read, about */
    bool is_new;                 /* an own file of one of the newest */
    bool is_asked;               /* a run names it that the limits are about */
    bool is_wasteful;
} source;

typedef struct gathering {
    compaction *c;
    manifest_entry *const *order; /* by run, then step */
    size_t count;
    source *sources; /* by id */
    size_t source_count;
    gathered_fn gathered;
    void *context;
} gathering;

/* Sources that go into one new file for each rank. */
typedef struct merge_set {
    gathering *g;
    source *const *sources;
    size_t count;
    hash_set files;        /* of the sources */
    hash_set live;         /* records */
    hash_set damaged;      /* places in files that cannot be read */
    size_t damaged_before; /* by the last try */
    bool *excluded;        /* of g->order: those that read what is damaged, and stay as they are */
    file_ref *outputs;     /* the new files */
    size_t output_count;
} merge_set;

/* A record in its file. */
uint64_t compact_record_hash(const chunk *c, const record *r);
/* Copies what is live of the sources, and publishes manifests that name the new files. Frees what the set holds. Errors: as compact_gather. */
ckd_status compact_merge(merge_set *x, ckd_error *err);

#endif
