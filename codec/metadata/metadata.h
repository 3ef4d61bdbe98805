/*
 * Metadata files: the small checksummed files of a store and the parts that ranks exchange. All share one envelope; codec/FORMAT.md,
 * "Metadata files", is normative. Encoders append to a buffer (check failed, which a metadata file above METADATA_MAX sets, too); decoders trust
 * nothing, copy out, and name path and offset in errors: UNSUPPORTED for newer versions, feature bits, another kind of
 * metadata file, checkpoint or fidelity; CORRUPT else, also for a metadata file of another store (`store` NULL: any will do); NOMEM.
 */
#ifndef CODEC_METADATA_METADATA_H
#define CODEC_METADATA_METADATA_H

#include "base/bytes.h"
#include "base/error.h"
#include "base/hash.h"

#define METADATA_MAX (64u << 20)

/* Stored: stable, appended only. RUN to PARITY are published like manifests, by generation. */
typedef enum metadata_kind {
    METADATA_STORE = 1,
    METADATA_MANIFEST = 2,
    METADATA_TOMBSTONE = 3,
    METADATA_INTENT = 4,
    METADATA_PART = 5,
    METADATA_RUN = 6,
    METADATA_PIN = 7,
    METADATA_TAG = 8,
    METADATA_POLICY = 9,
    METADATA_PARITY = 10,
    METADATA_PARITY_GROUP = 11, /* the head of a parity file (codec/parity/parity.h) */
    METADATA_DELETIONS = 12
} metadata_kind;

/* A chunk file as manifests, intents and parts name it. Its name in data/c is hex(id).ckd. */
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

/* Names a checkpoint's files and its lineage; its durable publication is the commit point. */
typedef struct manifest {
    ckd_checkpoint
        checkpoint; /* stored_bytes: of the records of this checkpoint in its files, the manifest excluded */
    ckd_id branch_origin; /* where this run left another one; zero if it did not */
    ckd_id *dependencies; /* other checkpoints that its blocks name; they need not exist any more */
    size_t dependency_count;
    /*
     * Every chunk file that a load reads: the first own_count hold records of this checkpoint, by rank; behind them older ones. Where
     * several files hold the same values of a checkpoint, the first of them counts.
     */
    file_ref *files;
    size_t file_count, own_count;
    bool
        own_only; /* an early version wrote it: older files are those that the manifests of its dependencies name */
    role_total *roles;
    size_t role_count;
    uint64_t file_bytes; /* of the manifest's own file; set by who reads it, not stored */
} manifest;
void manifest_encode(bytes *to, const ckd_id *store, const manifest *m);
ckd_status manifest_decode(manifest *out, const ckd_id *store, const void *data, size_t size,
                           const char *path, ckd_error *err);
void manifest_free(manifest *m); /* frees what it points to */
/* Appends the files that m does not name yet. Errors: NOMEM. */
ckd_status manifest_add_files(manifest *m, const file_ref *files, size_t count, ckd_error *err);

/* What a save or compaction in progress needs kept: its own files to be, and the checkpoints it builds on. */
typedef struct intent {
    ckd_id id; /* of the save */
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

/* What one rank reports to the coordinator of a save. */
enum { PART_STAGES_MAX = 16, PART_OPTIONS_MAX = 4096 };
typedef struct part {
    ckd_id checkpoint;
    uint32_t rank, world;
    file_ref file;
    ckd_id *dependencies;
    size_t dependency_count;
    uint64_t began_ns; /* when the rank began, by its clock, since 1970; 0: it does not tell its times */
    uint32_t stage_count;
    ckd_stage_times stages[PART_STAGES_MAX]; /* since then; save and rank are not looked at */
    uint8_t *options; /* that it was given, for the coordinator to compare; NULL: it does not tell */
    size_t options_size;
} part;
void part_encode(bytes *to, const ckd_id *store, const part *p);
ckd_status part_decode(part *out, const ckd_id *store, const void *data, size_t size, ckd_error *err);
void part_free(part *p);

/* A checkpoint that is being deleted: neither a rebuild nor an old catalog brings it back. */
typedef struct tombstone {
    ckd_id checkpoint;
    char run[CKD_RUN_MAX + 1];
    uint64_t step;
    uint32_t generation;           /* this one and all below are dead */
    uint64_t deleted_ns, until_ns; /* until then it can be taken back */
} tombstone;
void tombstone_encode(bytes *to, const ckd_id *store, const tombstone *t);
ckd_status tombstone_decode(tombstone *out, const ckd_id *store, const void *data, size_t size,
                            const char *path, ckd_error *err);

/* The store's deletion mark: every deletion gives the store another one. */
void deletions_encode(bytes *to, const ckd_id *store, const ckd_id *mark);
ckd_status deletions_decode(ckd_id *out, const ckd_id *store, const void *data, size_t size, const char *path,
                            ckd_error *err);

/* A checkpoint that stays whatever a policy says, and is not deleted before it is unpinned. */
typedef struct pin_setting {
    ckd_id checkpoint;
    uint32_t generation;
    uint64_t pinned_ns;
    char reason[CKD_REASON_MAX + 1]; /* "": none given */
} pin_setting;
void pin_encode(bytes *to, const ckd_id *store, const pin_setting *p);
ckd_status pin_decode(pin_setting *out, const ckd_id *store, const void *data, size_t size, const char *path,
                      ckd_error *err);

/* A name for a checkpoint, which keeps it as well. */
typedef struct tag_setting {
    char tag[CKD_RUN_MAX + 1];
    ckd_id checkpoint;
    uint32_t generation;
    uint64_t tagged_ns;
} tag_setting;
void tag_encode(bytes *to, const ckd_id *store, const tag_setting *t);
ckd_status tag_decode(tag_setting *out, const ckd_id *store, const void *data, size_t size, const char *path,
                      ckd_error *err);

/* What to keep of a run, or of all that have no policy of their own. */
typedef struct policy_setting {
    char run[CKD_RUN_MAX + 1]; /* "": all others */
    uint32_t generation;
    uint64_t set_ns;
    ckd_policy policy; /* without its run */
} policy_setting;
/* Does any rule of it keep something? */
bool policy_keeps(const ckd_policy *p);
void policy_encode(bytes *to, const ckd_id *store, const policy_setting *p);
ckd_status policy_decode(policy_setting *out, const ckd_id *store, const void *data, size_t size,
                         const char *path, ckd_error *err);

/* How chunk files of a run, or of all that have no such metadata file of their own, are to be covered by parity. */
typedef struct parity_setting {
    char run[CKD_RUN_MAX + 1]; /* "": all others */
    uint32_t generation;
    uint64_t set_ns;
    uint32_t data, parity; /* files of a group, at most; parity files of a group. Both 0: none */
} parity_setting;
void parity_encode(bytes *to, const ckd_id *store, const parity_setting *p);
ckd_status parity_decode(parity_setting *out, const ckd_id *store, const void *data, size_t size,
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
