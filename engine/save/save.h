/*
 * A save in progress. Internal to engine/. Its files, in the order in which a save passes through them:
 *
 *   begin.c         the intent and the chunk file; at the end, what becomes of the files, and the memory
 *   target.c        the run, the step and the parent; detects another launch that saves to a session's run
 *   tensor.c        takes tensors and blobs from the caller: each region is compared, cut, lossy or exact
 *   block_grid.c    a region's panels, and where their blocks end
 *   region_job.c    an exact span, block by block into the pipeline; progress
 *     values.c        reads the values of a block
 *     device_dedup.c  blocks on a device that need not be read
 *     device.c        blocks that a device codes before they enter the pipeline
 *   lossy.c         a lossy region, tile by tile: statistics, steps and factors, then its blocks into the pipeline
 *     quant_params.c  which tensors are lossy, and how finely they are coded
 *     tile_memory.c   how tiles are cut, and their memory
 *     tile_load.c     loads a tile; parent.c: its parent's values; reference.c: those that its device has cached
 *     grid_blocks.c   a tile's parts in panels, and what their blocks share
 *     moment_stats.c  statistics of moments for later tensors; moment_pair.c: the two moments of a parameter
 *   pipeline.c      the stages of a block: analyse, decide, encode, register, write
 *   order.c         the stages that run in block order
 *   writer.c        blocks into the chunk file; frees disk space when the disk is nearly full
 *   commit.c        seal (file durable) -> publish (manifest, the commit point) -> catalog
 *     suspect.c       have values become NaN or infinite?
 *
 * Used by all of them: names.c (refuses a region or blob that is saved twice), comparison.c (a checkpoint that exists
 * already), measures.c (error figures, values that are not finite), self_check.c (what a device made), terms.c (the
 * options on which all ranks must agree), times.c (how long each stage took), workspace.c (scratch that the next save
 * uses again).
 */
#ifndef ENGINE_SAVE_SAVE_H
#define ENGINE_SAVE_SAVE_H

#include <stdatomic.h>
#include <sys/types.h>

#include "base/float_mode.h"
#include "engine/common/common.h"
#include "engine/encode/encode.h"
#include "engine/save/block_grid.h"
#include "engine/save/measures.h"
#include "engine/save/pipeline.h"
#include "engine/save/self_check.h"

typedef enum save_state { SAVE_OPEN, SAVE_FAILED, SAVE_SEALED } save_state;

/* Where a save goes. Decided under the publish lock. */
typedef struct save_target {
    char run[CKD_RUN_MAX + 1];
    uint64_t step;
    bool has_origin;       /* the state comes from an existing checkpoint: `origin` */
    ckd_checkpoint origin; /* the delta's parent, unless a base was asked for */
    bool compare;          /* the checkpoint exists already: only compare with it */
    ckd_checkpoint existing;
    ckd_id branch_origin, resumed_from;
    uint32_t lossy_resumes;
    /* a session's save: the run's newest checkpoint when the save began */
    bool checks_launch, has_newest;
    ckd_checkpoint newest;
} save_target;
/* Checks the options as far as possible without the store. Errors: INVALID. */
ckd_status save_check_options(const ckd_save_options *options, ckd_error *err);
ckd_status save_resolve_target(save_target *out, ckd_store *store, const ckd_save_options *options,
                               ckd_error *err);
/* The latest date of the newest checkpoints of the run and its branches; 0: there is none, or it is unknown. */
uint64_t save_newest_date(ckd_store *store, const char *run);

/* The parts of an existing checkpoint that were found equal. */
typedef struct comparison {
    struct compared_tensor *tensors; /* in the order of the view's tensors */
    bool *blobs;
} comparison;

/* Statistics of moments that other tensors need (moment_stats.c). */
typedef struct moment_stats moment_stats;
/* By a hash of their weight's name and their place in it. Zero-initialise; moment_stats_end empties it. */
typedef struct moment_table {
    moment_stats **buckets;
    size_t size, count; /* of the buckets, a power of two or 0; of the entries */
} moment_table;

/* Names of the tensors and blobs saved so far: a hash table with open addressing (names.c). */
typedef struct saved_name saved_name;
typedef struct saved_names {
    saved_name **slots; /* the newest entry of each name; NULL: free */
    size_t count, capacity;
} saved_names;

/*
 * Memory of a save that the next save of the same store uses again: scratch as large as its blocks and tiles. A
 * session's store keeps it from save to save; others release it with the save.
 */
typedef struct save_workspace {
    struct columns_cache *columns; /* of lossy parents */
    uint32_t slots;
    struct block_job *jobs;                  /* one for each place in the pipeline */
    struct save_slot *places;                /* of the pipeline */
    struct save_tiles *tiles;                /* of lossy tensors; NULL: none were saved yet */
    struct chunk_scratch *writing, *copying; /* of the chunk file, and of materialized copies */
    content_index dedup_index; /* moves to the save while that has the workspace, as does `arena` */
    record_arena arena;
} save_workspace;

/*
 * When this rank worked on a stage (clock_monotonic_ns), and the work of all threads together. begun_ns == 0: not
 * yet.
 */
typedef struct save_stage {
    uint64_t begun_ns, ended_ns, work_ns;
} save_stage;
/* Adds `ns` of work that has just ended. */
void save_stage_add(save_stage *stage, uint64_t ns);

/* The times that a rank reports in its part. */
typedef struct save_rank {
    uint32_t rank;
    uint64_t began_ns; /* since 1970, by its clock */
    uint32_t stage_count;
    ckd_stage_times stages[PART_STAGES_MAX];
} save_rank;

/* The last answer of the file system about its free space. asked_ns: its time; added: bytes wanted since. */
typedef struct free_space {
    uint64_t available, asked_ns, added;
} free_space;

/* The files of the save, and the ids that name them. */
typedef struct save_output {
    ckd_id writer_id, file_id;
    pid_t process;          /* the owner of these files; a forked child must not touch them */
    file_lock *reader_lock; /* keeps the files that the parents need */
    file_lock *intent_lock; /* shows that this writer is alive */
    bool undecided;         /* a manifest was named, and may not have been removed again */
    file_ref sealed;        /* valid once SAVE_SEALED */
    /* used by the thread of LANE_WRITE, and by the saving thread while no blocks are in progress */
    chunk_writer *writer;
    chunk_writer *materialized;      /* copies of long chains; NULL: none so far */
    bool materialized_closed;        /* they are complete, under their temporary name */
    uint64_t copied_bytes;           /* size of their file */
    atomic_bool materialized_failed; /* no copies any more: they are not worth failing a save for */
    /* used by the thread of LANE_ORDER, and by the saving thread while no blocks are in progress */
    uint64_t index_bytes; /* approximate size of the index of what was written */
    free_space space;     /* only the thread of LANE_ORDER uses it */
    ckd_id *dependencies;
    size_t dependency_count, dependency_capacity;
} save_output;

/* The checkpoints from which the save reads. Set by ckd_save_begin; any thread uses the views. */
typedef struct save_sources {
    view_cache views;
    const view *parent;   /* the parent of deltas; NULL: none */
    const view *existing; /* when comparing */
    comparison compared;  /* with `existing`; used by the saving thread */
    atomic_bool damaged;  /* parts of the parent cannot be read; the saving thread reports it once */
    /* values of the parent that are cached in memory are not used, as the last save failed */
    bool ignore_cached;
    bool reported_damage;
} save_sources;

/* How blocks are coded. Constant after ckd_save_begin, except the budget. */
typedef struct save_coding {
    coding_context context;
    save_grid grid;
    uint64_t staging; /* bytes that may be held besides the caller's and the workers' memory */
    pathname scratch; /* directory for values that exceed `staging` */
    /* changed by the thread of LANE_ORDER; analyses read only what is the same during a whole save */
    load_budget budget;
} save_coding;

/* Facts about earlier tensors and blocks that later ones, or the commit, need. */
typedef struct save_registry {
    content_index dedup_index;         /* under pipeline.registry_lock */
    referenced_checkpoints referenced; /* under pipeline.registry_lock */
    step_states steps;       /* a tensor with an optimizer begins and ends while the pipeline is empty */
    save_measures nonfinite; /* of exact blocks; filled by the thread of LANE_ORDER */
    /* used by the saving thread: */
    record_arena arena; /* tensors, shapes and regions that `dedup_index` points to */
    saved_names names;
    bool has_masters;    /* exact masters were saved */
    bytes whole_masters; /* large masters that are not cut into panels (block_grid.c) */
} save_registry;

/* The tensor that ckd_save_tensor gets next, or has got. Used by the saving thread. */
typedef struct save_input {
    float_mode callers_mode; /* restored when a call returns */
    bool buffers_are_stable; /* the memory that tensors point to does not change before the save ends */
    double leaves_budget;    /* fraction of the next region job (region_job.fraction) */
    bytes rows;              /* of a tensor that is saved in panels (panels.c) */
    /*
     * The parent's values of exactly the region that comes next, in the caller's memory. NULL: not at hand. They are
     * compared with the store's hashes before use.
     */
    const void *parent_values;
    /*
     * Receives the decoded values of exactly that region, as far as they are known. May be the same memory as
     * `parent_values`. NULL: nowhere.
     */
    void *decoded_values;
} save_input;

/* For lossy tensors. Used by the saving thread; tiles and moments also by that of LANE_ORDER (measures.c). */
typedef struct save_lossy {
    struct save_tiles *tiles; /* NULL: none yet */
    moment_table moments;     /* of parameters whose tensors have not all come */
    save_measures measures;
    uint64_t in_doubt; /* regions of tensors that look like an optimizer's but have no role */
} save_lossy;

/* For tensors on devices. Used by the saving thread. */
typedef struct save_on_device {
    struct save_device *coder; /* for exact tensors; NULL: none yet */
    bool has_pending_values;   /* values of blocks in progress are still on a device, and may be needed */
    /*
     * Elements of the current tensor whose blocks the parent or this save has already. Counted only if masters were
     * saved; their values need not be read.
     */
    uint64_t named_elements;
    bool parents_on_host;        /* a device failed to decode the parents of lossy tiles */
    self_check_list self_checks; /* filled by the thread of LANE_ORDER */
} save_on_device;

/* Times and sizes that the save reports. */
typedef struct save_stats {
    uint64_t begun_ns;
    save_stage snapshot;               /* of a session: its work is the time that the trainer stood still */
    save_stage analyse, encode, write; /* under pipeline.mutex */
    save_stage sync;
    uint64_t raw_bytes;  /* saved so far */
    uint64_t publish_ns; /* when all parts had arrived */
    save_rank *ranks;    /* as the ranks reported; at most `world` */
    uint32_t rank_count;
} save_stats;

/* Only for ranks that save together. Set before the first tensor. */
typedef struct save_group {
    cancel_check stop; /* another rank is dead */
    /*
     * Called under the publish lock, before the manifest is published. Returns an error if rank 0 may not commit,
     * because the save was given up.
     */
    ckd_status (*claim)(void *context, const ckd_id *checkpoint, ckd_error *err);
    void *claim_context;
} save_group;

/*
 * A save. The thread that calls the public functions is the saving thread. While blocks are in progress the store's
 * workers help it (pipeline.h); each part says which of them use it.
 */
struct ckd_save {
    /* what was asked for: constant after ckd_save_begin */
    ckd_store *store;
    /* its strings belong to the caller and are not valid after begin; metric_name has a copy */
    ckd_save_options options;
    char metric_name[32];
    bytes terms; /* see terms.c */
    save_target target;
    ckd_id checkpoint;

    save_state state; /* changed by the saving thread between calls */
    save_input input;
    save_sources sources;
    save_coding coding;
    save_registry registry;
    save_pipeline pipeline;
    save_lossy lossy;
    save_on_device device;
    save_output output;
    save_stats stats;
    save_group group;
};

/* The fidelity of a role, by the options or in this save. */
ckd_fidelity save_fidelity_of(const ckd_save_options *options, ckd_role role);
ckd_fidelity save_fidelity(const ckd_save *save, ckd_role role);
/* Returns true if a tensor of this role and dtype is coded against its parent under these options. */
bool save_builds_on_parent(const ckd_save_options *options, ckd_role role, ckd_dtype dtype);
/* The coarsest fidelity of all roles, which is the checkpoint's. */
ckd_fidelity save_coarsest_fidelity(const ckd_save *save);

/* ---- workspace.c ---- */
/* Sets the save's jobs and pipeline, with the store's workspace if that is free. Errors: NOMEM. */
ckd_status save_workspace_take(struct ckd_save *save, ckd_error *err);
/*
 * Returns the workspace to the store, if the store keeps one and the save succeeded; else frees it. Called when
 * nobody works on the save any more.
 */
void save_workspace_return(struct ckd_save *save, bool reusable);
/* in_child: see columns_cache_free. Accepts NULL. */
void save_workspace_free(save_workspace *workspace, bool in_child);

/* ---- commit.c ---- */
/*
 * ckd_save_publish without the hook that follows it (store_hooks.after_commit), which must not keep other ranks
 * waiting.
 */
ckd_status save_publish(ckd_checkpoint *info, ckd_save *save, const ckd_part *parts, size_t count,
                        ckd_error *err);

/* ---- terms.c ---- */
/* Appends the options on which all ranks of a save must agree. */
void save_terms_put(bytes *to, const ckd_save_options *options);
/*
 * Returns INVALID, naming rank and option, unless the other rank has the options of the first. A rank without a
 * metric accepts the first one's. Accepts any bytes: a malformed list is INVALID, too.
 */
ckd_status save_terms_compare(const ckd_bytes *first, uint32_t first_rank, const ckd_bytes *second,
                              uint32_t rank, ckd_error *err);

#endif
