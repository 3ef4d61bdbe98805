/* The interface of codec/metadata/ for other rooms. README.md has an overview. */
#ifndef CODEC_METADATA_METADATA_H
#define CODEC_METADATA_METADATA_H

#include "base/bytes.h"
#include "base/error.h"
#include "base/hash.h"
#include "codec/common/common.h"

/*
 * Metadata files: the small checksummed files of a store, and the parts that ranks exchange. All share one envelope;
 * codec/FORMAT.md, "Metadata files", is normative.
 *
 * Encoders append to a buffer. The caller checks its `failed` flag, which a file above METADATA_MAX also sets. Decoders
 * trust nothing, copy everything out, and name path and offset in errors. UNSUPPORTED: a newer version, feature bits,
 * or another kind of metadata file, checkpoint or fidelity. CORRUPT: everything else, also a file of another store
 * (`store` NULL accepts any). Or NOMEM.
 */

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

/* Protects the files that a running save or compaction writes, and the checkpoints that it builds on. */
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
typedef struct rank_part {
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
} rank_part;
void part_encode(bytes *to, const ckd_id *store, const rank_part *p);
ckd_status part_decode(rank_part *out, const ckd_id *store, const void *data, size_t size, ckd_error *err);
void part_free(rank_part *p);

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

/* The deletion mark of the store. Every deletion replaces it with a new one. */
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
/* Returns true if any of its rules keeps something. */
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

/* A run that is being renamed. This setting exists from the decision until no manifest has the old name. */
typedef struct rename_setting {
    char run[CKD_RUN_MAX + 1]; /* the old name */
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

/*
 * Group records: the data from which an optimizer step is predicted. codec/FORMAT.md, "Group records" and "Optimizer
 * steps", is normative. A record holds the trainer's hyper-parameters, which are informative, and the rule and
 * coefficients derived from them. Decoders use only the rule and the coefficients.
 */

/* Stored in files: numbers are stable, new ones are appended. */
typedef enum group_kind { GROUP_ADAMW = 1, GROUP_ADAM = 2, GROUP_SGD = 3 } group_kind;

typedef enum group_coefficient {
    C_BETA1 = 0,
    C_REST1 = 1, /* 1 - beta1 */
    C_BETA2 = 2,
    C_REST2 = 3, /* 1 - beta2 */
    C_KEEP = 4,  /* decay factor of the weights: 1 - lr x decay; 1 if the decay is not decoupled */
    C_DECAY = 5, /* lr x decay, or 0 */
    C_RATE = 6,  /* lr / (1 - beta1^step) */
    C_ROOT = 7,  /* sqrt(1 - beta2^step) */
    C_EPS = 8,
    C_BIAS1 = 9,  /* 1 - beta1^step */
    C_BIAS2 = 10, /* 1 - beta2^step */
    C_LR = 11,
    C_WEIGHT_DECAY = 12, /* if the decay is decoupled, else 0 */
    C_MOMENTUM = 13,
    C_UNDAMPED = 14, /* 1 - dampening */
    C_SCALE = 6,     /* replaces C_RATE in rules with a bf16 gradient: the factor that was applied to it */
    GROUP_COEFFICIENTS = 15
} group_coefficient;

/* Inputs of a rule besides the previous step's values, in the order of the dependencies. */
typedef enum group_inputs {
    INPUTS_NONE = 0,          /* unknown rule */
    INPUTS_MOMENTS_BEFORE,    /* current and previous exp_avg: predict exp_avg_sq */
    INPUTS_MOMENT_SQUARE,     /* current exp_avg and exp_avg_sq: predict weights */
    INPUTS_MOMENTUM,          /* the current momentum */
    INPUTS_MOMENTUM_NESTEROV, /* the current and the previous momentum */
    INPUTS_GRADIENT           /* none: the payload has the gradient, which gives a first moment */
} group_inputs;

/* First and last rule of each family. codec/FORMAT.md has the formulas; kernels/scalar.h computes them. */
#define RULE_SQUARE_FIRST   1u
#define RULE_SQUARE_LAST    10u
#define RULE_ADAM_FIRST     17u
#define RULE_ADAM_LAST      22u
#define RULE_SGD_FIRST      33u
#define RULE_SGD_LAST       34u
#define RULE_NESTEROV_FIRST 35u
#define RULE_NESTEROV_LAST  36u
/* first moments: exp_avg of Adam, and the momentum of SGD */
#define RULE_MOMENT_FIRST   49u
#define RULE_MOMENT_LAST    54u
#define RULE_VELOCITY_FIRST 55u
#define RULE_VELOCITY_LAST  56u
/* the first family, for bf16 gradients */
#define RULE_BF16_FIRST 65u
#define RULE_BF16_LAST  69u

typedef struct optimizer_group {
    uint32_t kind; /* group_kind */
    uint32_t rule;
    bool nesterov;
    uint64_t step; /* updates made so far, including this one */
    double lr, beta1, beta2, eps, weight_decay, momentum, dampening;
    double coefficients[GROUP_COEFFICIENTS];
} optimizer_group;

#define GROUP_BYTES 192u
#define GROUP_NAME  "optimizer" /* name of all group records; their content distinguishes them */

group_inputs group_rule_inputs(uint32_t rule);
/* Number of value dependencies after the first: 0 to 2. */
uint32_t group_input_count(group_inputs inputs);

void group_encode(uint8_t to[GROUP_BYTES], const optimizer_group *g);
/*
 * Decodes a group. path and offset only serve error messages. Errors: CORRUPT (size, unknown flags), UNSUPPORTED (a
 * kind or rule unknown to this version).
 */
ckd_status group_decode(optimizer_group *out, const void *from, size_t size, const char *path,
                        uint64_t offset, ckd_error *err);

/* Shared by all metadata files: the envelope, and fields that several kinds have. codec/FORMAT.md, "Metadata files". */

#define METADATA_MAGIC \
    "\x89"             \
    "CKN\r\n\x1a\n"
#define METADATA_VERSION 1
/* Required features. */
#define METADATA_LOSSY      UINT32_C(1) /* manifest: its fidelity is near or coarse */
#define METADATA_OLDER      UINT32_C(2) /* manifest: it has the older files that a load reads */
#define METADATA_SUSPECT    UINT32_C(4) /* manifest: it ends with why the checkpoint is suspect */
#define METADATA_TIMES      UINT32_C(1) /* part: it ends with the rank's stage times */
#define METADATA_OPTIONS    UINT32_C(2) /* part: it contains the options passed to the rank */
#define METADATA_CALENDAR   UINT32_C(2) /* policy: it has rules about the newest checkpoint and periods */
#define METADATA_COMPACTION UINT32_C(1) /* policy: it ends with when to compact */

#define METADATA_ENVELOPE_FRONT 40u /* bytes before the payload */
#define METADATA_ENVELOPE_MIN   48u /* with the checksum behind the payload */
#define METADATA_ID_SIZE        16u
#define METADATA_FILE_SIZE      44u /* bytes of a file_ref */
#define METADATA_ROLE_SIZE      28u /* bytes of a role_total */

/* Appends the front of the envelope. Returns the metadata file's offset in the buffer. */
size_t metadata_begin(bytes *to, metadata_kind kind, const ckd_id *store, uint32_t generation,
                      uint32_t features);
/* Fills in payload size and checksum. A metadata file above METADATA_MAX sets `failed`. */
void metadata_end(bytes *to, size_t start);

/* A metadata file being decoded. */
typedef struct metadata_reader {
    reader in; /* the payload */
    ckd_id store;
    uint32_t generation;
    uint32_t features; /* required features, all known for this kind */
    const char *path;
    ckd_error *err;
    ckd_status status; /* the first problem; then `in` has failed, too */
} metadata_reader;

/*
 * Checks the envelope. `store` NULL accepts any store. If it fails, all fields read as zeros and metadata_close reports
 * it.
 */
metadata_reader metadata_open(metadata_kind kind, const ckd_id *store, const void *data, size_t size,
                              const char *path, ckd_error *err);
/*
 * Ends decoding. Returns the first problem of the envelope or a field, else CORRUPT if the payload is too short or too
 * long. After a failure the `size` bytes of `out` are zero.
 */
ckd_status metadata_close(metadata_reader *n, void *out, size_t size);
/* Records a problem with the field just read, unless there is one already. */
void metadata_fail(metadata_reader *n, ckd_status status, const char *problem);

void metadata_put_ids(bytes *to, const ckd_id *ids, size_t count);
void metadata_put_file(bytes *to, const file_ref *f);
void metadata_put_files(bytes *to, const file_ref *files, size_t count);

/* Reads an id; zero is invalid. */
ckd_id metadata_take_id(metadata_reader *n);
/* Reads a run name: 1 to CKD_RUN_MAX of A-Z a-z 0-9 . _ - ~, not starting with a dot or a dash. */
void metadata_take_run(metadata_reader *n, char run[CKD_RUN_MAX + 1]);
/* As metadata_take_run, or an empty name. */
void metadata_take_any_run(metadata_reader *n, char run[CKD_RUN_MAX + 1]);
/* As metadata_take_run, for a tag. */
void metadata_take_tag(metadata_reader *n, char tag[CKD_RUN_MAX + 1]);
/* Reads a step. The catalog can hold at most INT64_MAX. */
uint64_t metadata_take_step(metadata_reader *n);
file_ref metadata_take_file(metadata_reader *n);
/*
 * Arrays preceded by their count. The result is malloc'ed; if empty it is NULL with *count = 0. Memory is bounded by
 * the bytes left in the metadata file.
 */
ckd_id *metadata_take_ids(metadata_reader *n, size_t *count);
file_ref *metadata_take_files(metadata_reader *n, size_t *count);
/*
 * Reads the count of an array and returns zeroed memory for elements of `size` bytes. Each takes `item_size` bytes in
 * the metadata file.
 */
void *metadata_take_array(metadata_reader *n, size_t *count, size_t item_size, size_t size);
/* For kinds that are not published by generation: fails if the file has one. */
void metadata_check_no_generation(metadata_reader *n);
/* Checks that rank < world; so world is at least 1. */
void metadata_check_rank(metadata_reader *n, uint32_t rank, uint32_t world);

#endif
