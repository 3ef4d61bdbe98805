/*
 * Metadata files: the small checksummed files of a store, and the parts that ranks exchange. All share one envelope;
 * codec/FORMAT.md, "Metadata files", is normative.
 *
 * Encoders append to a buffer. Check its `failed` flag; a file above METADATA_MAX sets it, too. Decoders trust nothing,
 * copy everything out, and name path and offset in errors. UNSUPPORTED: a newer version, feature bits, or another kind
 * of metadata file, checkpoint or fidelity. CORRUPT: everything else, also another store's file (`store` NULL: any
 * store is accepted). Or NOMEM.
 */
#ifndef CODEC_METADATA_METADATA_H
#define CODEC_METADATA_METADATA_H

#include "base/bytes.h"
#include "base/error.h"
#include "base/hash.h"

#define METADATA_MAX (64u << 20)

/*
 * Stored in files: numbers are stable, new ones are appended. RENAME to PARITY are published by generation, like
 * manifests.
 */
typedef enum metadata_kind {
    METADATA_STORE = 1,
    METADATA_MANIFEST = 2,
    METADATA_TOMBSTONE = 3,
    METADATA_INTENT = 4,
    METADATA_PART = 5,
    METADATA_RENAME = 6,
    METADATA_PIN = 7,
    METADATA_TAG = 8,
    METADATA_POLICY = 9,
    METADATA_PARITY = 10,
    METADATA_PARITY_GROUP = 11, /* head of a parity file (codec/parity/parity.h) */
    METADATA_DELETIONS = 12
} metadata_kind;

/* A chunk file as named by manifests, intents and parts. Its name in data/c is hex(id).ckd. */
typedef struct file_ref {
    ckd_id id;
    uint32_t rank;
    uint64_t size; /* 0 in an intent */
    hash128 root;
} file_ref;

typedef struct role_total {
    uint32_t role;
    uint64_t tensors, raw_bytes, stored_bytes;
} role_total;

/* Names a checkpoint's files and its lineage. Its durable publication is the commit point. */
typedef struct manifest {
    /* stored_bytes: records of this checkpoint in its files, without the manifest */
    ckd_checkpoint checkpoint;
    ckd_id branch_origin; /* the checkpoint of another run where this run branched off; zero if none */
    ckd_id *dependencies; /* other checkpoints that its blocks depend on; they may no longer exist */
    size_t dependency_count;
    /*
     * Every chunk file that a load reads. The first own_count hold this checkpoint's records, by rank; older files
     * follow. If several files hold the same values of a checkpoint, the first one is used.
     */
    file_ref *files;
    size_t file_count, own_count;
    bool own_only; /* written by an early version: the manifests of its dependencies name the older files */
    role_total *roles;
    size_t role_count;
    uint64_t file_bytes; /* size of the manifest's own file; set by the reader, not stored */
} manifest;
void manifest_encode(bytes *to, const ckd_id *store, const manifest *m);
ckd_status manifest_decode(manifest *out, const ckd_id *store, const void *data, size_t size,
                           const char *path, ckd_error *err);
void manifest_free(manifest *m); /* frees what m points to */
/* Appends those of `files` that m does not yet name. Errors: NOMEM. */
ckd_status manifest_add_files(manifest *m, const file_ref *files, size_t count, ckd_error *err);

/* Protects what a running save or compaction needs: its future files, and the checkpoints that it builds on. */
typedef struct intent {
    ckd_id id; /* id of the save */
    char run[CKD_RUN_MAX + 1];
    uint64_t step;
    uint32_t rank, world;
    file_ref *files;
    size_t file_count;
    ckd_id *dependencies;
    size_t dependency_count;
} intent;
void intent_encode(bytes *to, const ckd_id *store, const intent *in);
ckd_status intent_decode(intent *out, const ckd_id *store, const void *data, size_t size, const char *path,
                         ckd_error *err);
void intent_free(intent *in);

/* One rank's report to the coordinator of a save. */
enum { PART_STAGES_MAX = 16, PART_OPTIONS_MAX = 4096 };
typedef struct part {
    ckd_id checkpoint;
    uint32_t rank, world;
    file_ref file;
    ckd_id *dependencies;
    size_t dependency_count;
    uint64_t began_ns; /* start of the rank's work by its clock, since 1970; 0: times are not reported */
    uint32_t stage_count;
    ckd_stage_times stages[PART_STAGES_MAX]; /* relative to began_ns; their save and rank are ignored */
    uint8_t *options; /* the options passed to the rank, for the coordinator to compare; NULL: not reported */
    size_t options_size;
} part;
void part_encode(bytes *to, const ckd_id *store, const part *p);
ckd_status part_decode(part *out, const ckd_id *store, const void *data, size_t size, ckd_error *err);
void part_free(part *p);

/* A checkpoint that is being deleted. Neither a rebuild nor an old catalog brings it back. */
typedef struct tombstone {
    ckd_id checkpoint;
    char run[CKD_RUN_MAX + 1];
    uint64_t step;
    uint32_t generation;           /* this generation and all below are deleted */
    uint64_t deleted_ns, until_ns; /* it can be restored before until_ns */
} tombstone;
void tombstone_encode(bytes *to, const ckd_id *store, const tombstone *t);
ckd_status tombstone_decode(tombstone *out, const ckd_id *store, const void *data, size_t size,
                            const char *path, ckd_error *err);

/* The store's deletion mark. Every deletion replaces it by another one. */
void deletions_encode(bytes *to, const ckd_id *store, const ckd_id *mark);
ckd_status deletions_decode(ckd_id *out, const ckd_id *store, const void *data, size_t size, const char *path,
                            ckd_error *err);

/* A pinned checkpoint: policies keep it, and it cannot be deleted before it is unpinned. */
typedef struct pin_setting {
    ckd_id checkpoint;
    uint32_t generation;
    uint64_t pinned_ns;
    char reason[CKD_REASON_MAX + 1]; /* "": no reason */
} pin_setting;
void pin_encode(bytes *to, const ckd_id *store, const pin_setting *p);
ckd_status pin_decode(pin_setting *out, const ckd_id *store, const void *data, size_t size, const char *path,
                      ckd_error *err);

/* A tag: a name for a checkpoint, which also keeps it. */
typedef struct tag_setting {
    char tag[CKD_RUN_MAX + 1];
    ckd_id checkpoint;
    uint32_t generation;
    uint64_t tagged_ns;
} tag_setting;
void tag_encode(bytes *to, const ckd_id *store, const tag_setting *t);
ckd_status tag_decode(tag_setting *out, const ckd_id *store, const void *data, size_t size, const char *path,
                      ckd_error *err);

/* A retention policy of one run, or of all runs without one of their own. */
typedef struct policy_setting {
    char run[CKD_RUN_MAX + 1]; /* "": all other runs */
    uint32_t generation;
    uint64_t set_ns;
    ckd_policy policy; /* its `run` is not set */
} policy_setting;
/* Does any of its rules keep something? */
bool policy_keeps(const ckd_policy *p);
void policy_encode(bytes *to, const ckd_id *store, const policy_setting *p);
ckd_status policy_decode(policy_setting *out, const ckd_id *store, const void *data, size_t size,
                         const char *path, ckd_error *err);

/* Parity setting for chunk files of one run, or of all runs without one of their own. */
typedef struct parity_setting {
    char run[CKD_RUN_MAX + 1]; /* "": all other runs */
    uint32_t generation;
    uint64_t set_ns;
    uint32_t data, parity; /* most chunk files per group; parity files per group. Both 0: no parity */
} parity_setting;
void parity_encode(bytes *to, const ckd_id *store, const parity_setting *p);
ckd_status parity_decode(parity_setting *out, const ckd_id *store, const void *data, size_t size,
                         const char *path, ckd_error *err);

/* A run that is being renamed. It exists from the decision until all manifests have the new name. */
typedef struct rename_setting {
    char run[CKD_RUN_MAX + 1]; /* the name before */
    uint32_t generation;
    char to[CKD_RUN_MAX + 1];
    uint64_t renamed_ns;
} rename_setting;
void rename_encode(bytes *to, const ckd_id *store, const rename_setting *r);
/* CORRUPT also if both names are equal. */
ckd_status rename_decode(rename_setting *out, const ckd_id *store, const void *data, size_t size,
                         const char *path, ckd_error *err);

/* The store's identity file. */
typedef struct store_identity {
    ckd_id id;
    uint64_t created_ns;
} store_identity;
void store_identity_encode(bytes *to, const store_identity *s);
ckd_status store_identity_decode(store_identity *out, const void *data, size_t size, const char *path,
                                 ckd_error *err);

#endif
