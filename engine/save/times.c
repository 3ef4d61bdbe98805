/* How long each stage of a save took: each rank reports its times with its part, and the catalog gets all of them. */
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "engine/save/internal.h"

void save_stage_add(save_stage *stage, uint64_t ns) {
    uint64_t now = clock_monotonic_ns();
    /* threads may end in another order than they began */
    if (stage->begun_ns == 0 || now - ns < stage->begun_ns) {
        stage->begun_ns = now - ns;
    }
    stage->ended_ns = now;
    stage->work_ns += ns;
}

void save_add_analysis(ckd_save *save, uint64_t ns) {
    pthread_mutex_lock(&save->pipeline.mutex);
    save_stage_add(&save->stats.analyse, ns);
    pthread_mutex_unlock(&save->pipeline.mutex);
}

/* When this rank began. A session begins its snapshot before the save. */
static uint64_t origin_of(const ckd_save *save) {
    uint64_t snapshot = save->stats.snapshot.begun_ns;
    return snapshot && snapshot < save->stats.begun_ns ? snapshot : save->stats.begun_ns;
}

void save_put_times(rank_part *to, const ckd_save *save) {
    const struct {
        ckd_stage stage;
        const save_stage *times;
        uint64_t bytes;
    } stages[] = {{CKD_STAGE_SNAPSHOT, &save->stats.snapshot, save->stats.raw_bytes},
                  {CKD_STAGE_ANALYSE, &save->stats.analyse, save->stats.raw_bytes},
                  {CKD_STAGE_ENCODE, &save->stats.encode, save->stats.raw_bytes},
                  {CKD_STAGE_WRITE, &save->stats.write, save->output.sealed.size + save->output.copied_bytes},
                  {CKD_STAGE_SYNC, &save->stats.sync, save->output.sealed.size}};
    uint64_t origin = origin_of(save);
    to->began_ns = clock_wall_ns() - (clock_monotonic_ns() - origin);
    for (size_t i = 0; i < sizeof(stages) / sizeof(stages[0]); i++) {
        const save_stage *times = stages[i].times;
        /* a stage may seem to begin before its rank, because the clock ran on while its times were added up */
        if (times->begun_ns) {
            uint64_t begin = times->begun_ns > origin ? times->begun_ns - origin : 0;
            uint64_t end = times->ended_ns > origin ? times->ended_ns - origin : 0;
            to->stages[to->stage_count++] = (ckd_stage_times){0,   save->options.rank, stages[i].stage, begin,
                                                              end, times->work_ns,     stages[i].bytes};
        }
    }
}

ckd_status save_take_times(ckd_save *save, const rank_part *reported, ckd_error *err) {
    uint32_t world = save->options.world;
    if (!reported->began_ns) {
        return CKD_OK;
    }
    if (!save->stats.ranks) {
        save->stats.ranks = calloc(world, sizeof(*save->stats.ranks));
        if (!save->stats.ranks) {
            return err_nomem(err, world * sizeof(*save->stats.ranks), "the times of ranks");
        }
    }
    save_rank *rank = &save->stats.ranks[save->stats.rank_count++];
    *rank = (save_rank){
        .rank = reported->rank, .began_ns = reported->began_ns, .stage_count = reported->stage_count};
    memcpy(rank->stages, reported->stages, sizeof(rank->stages));
    return CKD_OK;
}

/* When the rank's part was ready, in ns since the rank began. */
static uint64_t end_of(const save_rank *rank) {
    uint64_t end = 0;
    for (uint32_t i = 0; i < rank->stage_count; i++) {
        end = rank->stages[i].end_ns > end ? rank->stages[i].end_ns : end;
    }
    return end;
}

/*
 * When a rank began, in ns since 1970 by the coordinator's clock. The rank's own clock may differ. If its part seems to
 * be ready after all parts had arrived, or more than an hour before, it counts as ready at the moment of arrival.
 */
static uint64_t begin_of(const save_rank *rank, uint64_t publish_ns) {
    const uint64_t hour = UINT64_C(3600000000000);
    uint64_t end = end_of(rank), latest = publish_ns > end ? publish_ns - end : 0;
    return rank->began_ns > latest || rank->began_ns + hour < latest ? latest : rank->began_ns;
}

static ckd_status add_rank(const ckd_save *save, const ckd_id *id, const save_rank *rank, uint64_t from_ns,
                           uint64_t publish_ns, ckd_error *err) {
    catalog *c = save->store->catalog;
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < rank->stage_count && status == CKD_OK; i++) {
        ckd_stage_times s = rank->stages[i];
        s.rank = rank->rank;
        s.begin_ns += from_ns;
        s.end_ns += from_ns;
        status = catalog_add_stage(c, id, &s, err);
    }
    if (status == CKD_OK && save->options.world > 1) {
        ckd_stage_times wait = {.rank = rank->rank, .stage = CKD_STAGE_WAIT, .end_ns = publish_ns};
        wait.begin_ns = from_ns + end_of(rank);
        wait.begin_ns = wait.begin_ns < publish_ns ? wait.begin_ns : publish_ns;
        status = catalog_add_stage(c, id, &wait, err);
    }
    return status;
}

/* Adds the stages of all ranks, in ns since the first rank began. */
static ckd_status add_ranks(const ckd_save *save, const ckd_id *id, ckd_error *err) {
    uint64_t now = clock_monotonic_ns(), since_publish = now - save->stats.publish_ns;
    uint64_t publish = clock_wall_ns() - since_publish, first = publish;
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < save->stats.rank_count; i++) {
        uint64_t begun_ns = begin_of(&save->stats.ranks[i], publish);
        first = begun_ns < first ? begun_ns : first;
    }
    for (uint32_t i = 0; i < save->stats.rank_count && status == CKD_OK; i++) {
        uint64_t from = begin_of(&save->stats.ranks[i], publish) - first;
        status = add_rank(save, id, &save->stats.ranks[i], from, publish - first, err);
    }
    ckd_stage_times commit = {
        .rank = save->options.rank, .stage = CKD_STAGE_COMMIT, .begin_ns = publish - first};
    commit.end_ns = commit.begin_ns + since_publish;
    commit.work_ns = since_publish;
    return status == CKD_OK && save->stats.rank_count
               ? catalog_add_stage(save->store->catalog, id, &commit, err)
               : status;
}

/*
 * Bytes that the save wrote on all ranks: chunk files, materialized copies and the manifest. 0 if a rank did not report
 * its part.
 */
static uint64_t written_bytes(const ckd_save *save, const ckd_checkpoint *saved) {
    uint64_t written = 0, chunk_files = 0, ranks = 0;
    for (uint32_t i = 0; i < save->stats.rank_count; i++) {
        const save_rank *rank = &save->stats.ranks[i];
        for (uint32_t k = 0; k < rank->stage_count; k++) {
            const ckd_stage_times *s = &rank->stages[k];
            written += s->stage == CKD_STAGE_WRITE ? s->bytes : 0;
            chunk_files += s->stage == CKD_STAGE_SYNC ? s->bytes : 0;
            ranks += s->stage == CKD_STAGE_WRITE;
        }
    }
    return ranks == save->options.world && saved->stored_bytes > chunk_files
               ? written + (saved->stored_bytes - chunk_files)
               : 0;
}

ckd_status save_store_times(const ckd_save *save, const ckd_checkpoint *saved, ckd_error *err) {
    const struct {
        const char *stage;
        uint64_t ns, bytes;
    } stages[] = {{"analyse", save->stats.analyse.work_ns, saved->raw_bytes},
                  {"encode", save->stats.encode.work_ns, saved->raw_bytes},
                  {"write", save->stats.write.work_ns, written_bytes(save, saved)},
                  {"sync", save->stats.sync.work_ns, saved->stored_bytes},
                  {"total", clock_monotonic_ns() - save->stats.begun_ns, saved->raw_bytes},
                  {"stall", save->stats.snapshot.work_ns, saved->raw_bytes}};
    ckd_status status = CKD_OK;
    size_t count = sizeof(stages) / sizeof(stages[0]) - (save->stats.snapshot.work_ns == 0);
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        status = catalog_add_timing(save->store->catalog, &saved->id, stages[i].stage, stages[i].ns,
                                    stages[i].bytes, err);
    }
    return status == CKD_OK ? add_ranks(save, &saved->id, err) : status;
}
