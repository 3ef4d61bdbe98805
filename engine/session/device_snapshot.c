/*
 * Copies the trainer's data to device memory or pinned host memory, in the order of its streams. Sources share launches
 * where they can, because a trainer that queues too many commands has to wait.
 */
#include "engine/session/device_snapshot.h"

#include <stdlib.h>
#include <string.h>

#include "engine/session/snapshot.h"
#include "kernels/device_open.h"

#define PLACE_ALIGN UINT64_C(256)
/* A launch with many copies takes as long as one copy of this size; smaller ones count as equal. */
#define SHORT_COPY      (UINT64_C(256) << 10)
#define WIDE            16u /* bytes of an access to aligned addresses */
#define SAMPLES_AT_ONCE 256 /* samples that go to the host together */

/* Copies with one completion mark: those of one group on one device. */
typedef struct copied_group {
    uint32_t group;
    void *mark;
    size_t first, count; /* its sources, in snapshot_part.order */
    bool awaited;        /* a reader has waited for the mark since the last start */
} copied_group;

/*
 * The part of a snapshot on one device. Its device memory holds the larger sources, then the small ones. The small ones
 * go to the host in one transfer, behind the sources that were copied there directly.
 */
typedef struct snapshot_part {
    int device;
    device_queue queue;
    uint8_t *memory, *pinned, *sampled;   /* sampled: pinned memory for samples; NULL before the first */
    uint64_t on_device, on_host, carried; /* bytes of each kind */
    void *arrived;                        /* mark: the small sources are on the host */
    bool awaited;                         /* a reader has waited for `arrived` since the last start */
    copied_group *groups;                 /* in the order of copying */
    size_t group_count;
    size_t *order;  /* sources, by group */
    void **streams; /* the trainer's */
    size_t stream_count;
} snapshot_part;

typedef enum source_home { HOME_DEVICE, HOME_CARRIED, HOME_PINNED } source_home;
typedef struct source_place {
    snapshot_part *part;
    source_home home;
    uint64_t at; /* offset in that memory */
} source_place;

struct device_snapshot {
    const device_backend *backend;
    const device_source *sources;
    size_t count;
    source_place *places; /* by source */
    snapshot_part *parts;
    size_t part_count;
    uint64_t refused;
};

static uint64_t place_size(uint64_t size) {
    return (size + PLACE_ALIGN - 1) / PLACE_ALIGN * PLACE_ALIGN;
}

/* Returns whether one more source of this size fits on the device. */
static bool has_room(uint64_t size, uint64_t used, uint64_t limit) {
    return size <= limit && used <= limit - size;
}

static bool first_on_its_device(const device_source *sources, size_t i) {
    size_t j = 0;
    while (sources[j].device != sources[i].device) {
        j++;
    }
    return j == i;
}

static bool is_small(const device_source *source) {
    return source->bytes <= DEVICE_SMALL;
}

device_snapshot_bytes device_snapshot_bytes_of(const device_source *sources, size_t count, uint64_t limit) {
    device_snapshot_bytes need = {0, 0, 0};
    for (size_t i = 0; i < count; i++) {
        uint64_t used = 0;
        for (size_t j = i; j < count && first_on_its_device(sources, i); j++) {
            uint64_t size = place_size(sources[j].bytes);
            bool same_device = sources[j].device == sources[i].device, fits = has_room(size, used, limit);
            used += same_device && fits ? size : 0;
            need.carried += same_device && fits && is_small(&sources[j]) ? size : 0;
            need.on_host += same_device && !fits ? size : 0;
        }
        need.on_one_device = used > need.on_one_device ? used : need.on_one_device;
    }
    return need;
}

/* ---- description of the sources ---- */

static snapshot_part *part_of(device_snapshot *s, int device) {
    for (size_t i = 0; i < s->part_count; i++) {
        if (s->parts[i].device == device) {
            return &s->parts[i];
        }
    }
    s->parts[s->part_count] = (snapshot_part){.device = device};
    return &s->parts[s->part_count++];
}

static void record_stream(snapshot_part *part, void *stream) {
    for (size_t i = 0; i < part->stream_count; i++) {
        if (part->streams[i] == stream) {
            return;
        }
    }
    part->streams[part->stream_count++] = stream;
}

static copied_group *group_of(const snapshot_part *part, uint32_t group) {
    size_t i = 0;
    while (i < part->group_count && part->groups[i].group != group) {
        i++;
    }
    return &part->groups[i];
}

static void record_group(snapshot_part *part, uint32_t group) {
    copied_group *g = group_of(part, group);
    if (g == &part->groups[part->group_count]) {
        *g = (copied_group){.group = group};
        part->group_count++;
    }
    g->count++;
}

static int by_number(const void *a, const void *b) {
    const copied_group *x = a, *y = b;
    return (x->group > y->group) - (x->group < y->group);
}

/* Turns counts into positions: each group's sources are consecutive, in the order of registration. */
static void put_in_order(device_snapshot *s) {
    for (size_t i = 0; i < s->part_count; i++) {
        snapshot_part *part = &s->parts[i];
        qsort(part->groups, part->group_count, sizeof(*part->groups), by_number);
        for (size_t g = 1; g < part->group_count; g++) {
            part->groups[g].first = part->groups[g - 1].first + part->groups[g - 1].count;
        }
        for (size_t g = 0; g < part->group_count; g++) {
            part->groups[g].count = 0;
        }
    }
    for (size_t i = 0; i < s->count; i++) {
        snapshot_part *part = s->places[i].part;
        copied_group *g = group_of(part, s->sources[i].group);
        part->order[g->first + g->count++] = i;
    }
}

/* Assigns memory to each source: on its device while that has room. */
static void place_sources(device_snapshot *s, uint64_t limit) {
    for (size_t i = 0; i < s->count; i++) {
        snapshot_part *part = s->places[i].part;
        uint64_t size = place_size(s->sources[i].bytes);
        bool fits = has_room(size, part->on_device + part->carried, limit), small = is_small(&s->sources[i]);
        uint64_t *end = !fits ? &part->on_host : small ? &part->carried : &part->on_device;
        s->places[i].home = !fits ? HOME_PINNED : small ? HOME_CARRIED : HOME_DEVICE;
        s->places[i].at = *end;
        *end += size;
    }
}

/* Allocates and fills places and parts. Each part has as many streams and groups as there are sources, at most. */
static ckd_status describe(device_snapshot *s, ckd_error *err) {
    s->places = calloc(s->count, sizeof(*s->places));
    s->parts = calloc(s->count, sizeof(*s->parts));
    if (!s->places || !s->parts) {
        return err_nomem(err, s->count * sizeof(*s->parts), "a snapshot's description");
    }
    for (size_t i = 0; i < s->count; i++) {
        snapshot_part *part = part_of(s, s->sources[i].device);
        if (!part->streams) {
            part->streams = calloc(s->count, sizeof(*part->streams));
            part->groups = calloc(s->count, sizeof(*part->groups));
            part->order = calloc(s->count, sizeof(*part->order));
        }
        if (!part->streams || !part->groups || !part->order) {
            return err_nomem(err, s->count * sizeof(*part->groups), "a snapshot's description");
        }
        s->places[i].part = part;
        record_stream(part, s->sources[i].stream);
        record_group(part, s->sources[i].group);
    }
    put_in_order(s);
    return CKD_OK;
}

/* ---- memory ---- */

/* Moves all sources of the part to host memory. */
static void give_up_device(device_snapshot *s, snapshot_part *part) {
    s->refused += part->on_device + part->carried;
    part->on_device = part->carried = part->on_host = 0;
    for (size_t i = 0; i < s->count; i++) {
        if (s->places[i].part == part) {
            s->places[i].home = HOME_PINNED;
            s->places[i].at = part->on_host;
            part->on_host += place_size(s->sources[i].bytes);
        }
    }
}

static ckd_status part_open(device_snapshot *s, snapshot_part *part, ckd_error *err) {
    const device_backend *backend = s->backend;
    device_failure why = {DEVICE_DONE, "", ""};
    device_result result = backend->queue_open(&part->queue, part->device, true, &why);
    if (result != DEVICE_DONE) {
        part->queue.stream = NULL;
        return device_status(&why, part->device, err);
    }
    void *memory = NULL;
    if (part->on_device + part->carried) {
        result = backend->allocate(&memory, part->device, part->on_device + part->carried, &why);
        part->memory = memory;
        if (result == DEVICE_FULL) {
            give_up_device(s, part);
            result = DEVICE_DONE;
        }
    }
    if (result == DEVICE_DONE && part->on_host + part->carried) {
        result = backend->allocate_pinned(&memory, part->device, part->on_host + part->carried, &why);
        part->pinned = result == DEVICE_DONE ? memory : NULL;
    }
    if (result == DEVICE_DONE) {
        result = backend->event_new(&part->arrived, part->device, &why);
    }
    for (size_t i = 0; i < part->group_count && result == DEVICE_DONE; i++) {
        result = backend->event_new(&part->groups[i].mark, part->device, &why);
    }
    return result == DEVICE_DONE ? CKD_OK : device_status(&why, part->device, err);
}

ckd_status device_snapshot_new(device_snapshot **out, const device_source *sources, size_t count,
                               uint64_t limit, ckd_error *err) {
    *out = NULL;
    const device_backend *backend = device_backend_open(err);
    device_snapshot *s = backend ? calloc(1, sizeof(*s)) : NULL;
    if (!s) {
        return backend ? err_nomem(err, sizeof(*s), "a snapshot") : CKD_E_DEVICE;
    }
    *s = (device_snapshot){.backend = backend, .sources = sources, .count = count};
    ckd_status status = describe(s, err);
    if (status == CKD_OK) {
        place_sources(s, limit);
    }
    for (size_t i = 0; i < s->part_count && status == CKD_OK; i++) {
        status = part_open(s, &s->parts[i], err);
    }
    if (status != CKD_OK) {
        device_snapshot_free(s, false);
        return status;
    }
    *out = s;
    return CKD_OK;
}

static void part_close(const device_snapshot *s, snapshot_part *part) {
    device_failure why = {DEVICE_DONE, "", ""};
    if (!part->queue.stream) {
        return;
    }
    s->backend->finish(&part->queue, &why); /* before its memory is released */
    for (size_t i = 0; i < part->group_count; i++) {
        s->backend->event_free(part->device, part->groups[i].mark);
    }
    s->backend->event_free(part->device, part->arrived);
    s->backend->release(part->device, part->memory);
    s->backend->release_pinned(part->device, part->pinned);
    s->backend->release_pinned(part->device, part->sampled);
    s->backend->queue_close(&part->queue);
}

void device_snapshot_free(device_snapshot *s, bool in_child) {
    if (!s) {
        return;
    }
    for (size_t i = 0; i < s->part_count; i++) {
        if (!in_child) { /* a child cannot use the device */
            part_close(s, &s->parts[i]);
        }
        free(s->parts[i].streams);
        free(s->parts[i].groups);
        free(s->parts[i].order);
    }
    free(s->parts);
    free(s->places);
    free(s);
}

device_snapshot_size device_snapshot_sizes(const device_snapshot *s) {
    device_snapshot_size sizes = {.refused = s->refused};
    for (size_t i = 0; i < s->part_count; i++) {
        sizes.on_devices += s->parts[i].on_device + s->parts[i].carried;
        sizes.on_host += s->parts[i].on_host + s->parts[i].carried;
    }
    return sizes;
}

/* ---- copying: many sources in a launch (a device can write to pinned memory, too) ---- */

/*
 * A stream holds some thousand pending commands; a thread that adds more must wait, and here that is the trainer.
 * Larger sources therefore also share a launch, but only if they are of similar size, because all spans of a launch get
 * as many blocks as the largest. Copies over the bus do not share launches; they would keep kernels busy for long.
 */

/* Returns the first destination of a source's copy. */
static uint8_t *copy_of(const device_snapshot *s, size_t i) {
    const source_place *p = &s->places[i];
    const snapshot_part *part = p->part;
    return p->home == HOME_PINNED   ? part->pinned + p->at
           : p->home == HOME_DEVICE ? part->memory + p->at
                                    : part->memory + part->on_device + p->at;
}

typedef struct copies_together {
    device_span span[DEVICE_SPANS];
    uint32_t count;
    uint64_t min, max; /* bytes; short copies count as SHORT_COPY */
} copies_together;

static device_result copy_batch(const device_snapshot *s, const snapshot_part *part, copies_together *all,
                                device_failure *why) {
    const device_elements as_bytes = {.operation = DEVICE_COPY, .dtype = CKD_U8};
    bool supported;
    uint32_t count = all->count;
    all->count = 0;
    return count ? s->backend->elements(&part->queue, &supported, &as_bytes, all->span, count, why)
                 : DEVICE_DONE;
}

static device_result add_copy(const device_snapshot *s, const snapshot_part *part, copies_together *all,
                              device_span span, device_failure *why) {
    uint64_t size = span.n < SHORT_COPY ? SHORT_COPY : span.n;
    bool alike = all->count == 0 || (size <= 2 * all->min && all->max <= 2 * size);
    device_result result = alike ? DEVICE_DONE : copy_batch(s, part, all, why);
    bool first = all->count == 0;
    all->min = first || size < all->min ? size : all->min;
    all->max = first || size > all->max ? size : all->max;
    all->span[all->count++] = span;
    return result == DEVICE_DONE && all->count == DEVICE_SPANS ? copy_batch(s, part, all, why) : result;
}

/* large, small: collected copies that are not launched yet. */
static device_result copy_source(const device_snapshot *s, const snapshot_part *part, size_t i,
                                 copies_together *large, copies_together *small, device_failure *why) {
    const device_source *source = &s->sources[i];
    const device_span span = {.to = copy_of(s, i), .from = source->data, .n = source->bytes};
    bool pinned = s->places[i].home == HOME_PINNED, is_short = source->bytes < SHORT_COPY,
         wide = ((uintptr_t)span.to | (uintptr_t)span.from) % WIDE == 0;
    if (pinned ? !is_small(source) : !is_short && !wide) {
        return s->backend->copy(&part->queue, span.to, span.from, span.n,
                                pinned ? DEVICE_TO_HOST : DEVICE_ON_DEVICE, why);
    }
    return add_copy(s, part, is_short ? small : large, span, why);
}

static device_result copy_group(const device_snapshot *s, const snapshot_part *part, const copied_group *g,
                                device_failure *why) {
    copies_together large = {.count = 0}, small = {.count = 0};
    device_result result = DEVICE_DONE;
    for (size_t k = 0; k < g->count && result == DEVICE_DONE; k++) {
        size_t i = part->order[g->first + k];
        result = s->sources[i].bytes ? copy_source(s, part, i, &large, &small, why) : DEVICE_DONE;
    }
    result = result == DEVICE_DONE ? copy_batch(s, part, &large, why) : result;
    result = result == DEVICE_DONE ? copy_batch(s, part, &small, why) : result;
    return result == DEVICE_DONE ? s->backend->event_record(g->mark, &part->queue, why) : result;
}

/* Comes after all groups, so that none of them waits for the bus. */
static device_result carry_small(const device_snapshot *s, const snapshot_part *part, device_failure *why) {
    device_result result =
        part->carried ? s->backend->copy(&part->queue, part->pinned + part->on_host,
                                         part->memory + part->on_device, part->carried, DEVICE_TO_HOST, why)
                      : DEVICE_DONE;
    return result == DEVICE_DONE ? s->backend->event_record(part->arrived, &part->queue, why) : result;
}

static ckd_status start_part(const device_snapshot *s, snapshot_part *part, ckd_error *err) {
    device_failure why = {DEVICE_DONE, "", ""};
    device_result result = DEVICE_DONE;
    part->awaited = false;
    for (size_t i = 0; i < part->stream_count && result == DEVICE_DONE; i++) {
        result = s->backend->queue_after_stream(&part->queue, part->streams[i], &why);
    }
    for (size_t i = 0; i < part->group_count && result == DEVICE_DONE; i++) {
        part->groups[i].awaited = false;
        result = copy_group(s, part, &part->groups[i], &why);
    }
    result = result == DEVICE_DONE ? carry_small(s, part, &why) : result;
    return device_status(&why, part->device, err);
}

ckd_status device_snapshot_start(device_snapshot *s, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < s->part_count && status == CKD_OK; i++) {
        status = start_part(s, &s->parts[i], err);
    }
    return status;
}

/* ---- waiting ---- */

static device_result fence_streams(const device_snapshot *s, const snapshot_part *part, void *mark,
                                   device_failure *why) {
    device_result result = DEVICE_DONE;
    for (size_t i = 0; i < part->stream_count && result == DEVICE_DONE; i++) {
        result = s->backend->stream_wait_event(mark, part->device, part->streams[i], why);
    }
    if (result != DEVICE_DONE) {
        why->result = DEVICE_DONE;
        result = s->backend->event_wait(mark, part->device, why);
    }
    return result;
}

/* The last group's mark stands for all groups, because they are copied in order. */
static ckd_status fence_part(const device_snapshot *s, const snapshot_part *part, uint32_t group,
                             ckd_error *err) {
    device_failure why = {DEVICE_DONE, "", ""};
    const copied_group *end = &part->groups[part->group_count],
                       *g = group == SNAPSHOT_ALL ? end - 1 : group_of(part, group);
    if (g < end) {
        fence_streams(s, part, g->mark, &why);
    }
    return device_status(&why, part->device, err);
}

ckd_status device_snapshot_fence(device_snapshot *s, uint32_t group, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < s->part_count && status == CKD_OK; i++) {
        status = fence_part(s, &s->parts[i], group, err);
    }
    return status;
}

static ckd_status wait_for_mark(const device_snapshot *s, const snapshot_part *part, void *mark,
                                ckd_error *err) {
    device_failure why = {DEVICE_DONE, "", ""};
    s->backend->event_wait(mark, part->device, &why);
    return device_status(&why, part->device, err);
}

/* Waits for a mark once, for all sources that it covers. */
static ckd_status await_once(bool *awaited, const device_snapshot *s, const snapshot_part *part, void *mark,
                             ckd_error *err) {
    ckd_status status = *awaited ? CKD_OK : wait_for_mark(s, part, mark, err);
    *awaited = status == CKD_OK;
    return status;
}

ckd_status device_snapshot_wait(device_snapshot *s, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < s->part_count && status == CKD_OK; i++) {
        const snapshot_part *part = &s->parts[i];
        status = wait_for_mark(s, part, part->arrived, err);
    }
    return status;
}

ckd_status device_snapshot_read(const void **data, ckd_device *device, device_snapshot *s, size_t i,
                                ckd_error *err) {
    const source_place *place = &s->places[i];
    snapshot_part *part = place->part;
    *data = copy_of(s, i);
    *device = (ckd_device){0};
    if (place->home == HOME_PINNED) {
        copied_group *g = group_of(part, s->sources[i].group);
        return await_once(&g->awaited, s, part, g->mark, err);
    }
    if (place->home == HOME_CARRIED) {
        *data = part->pinned + part->on_host + place->at;
        return await_once(&part->awaited, s, part, part->arrived, err);
    }
    *device = (ckd_device)CKD_DEVICE_INIT;
    device->device = part->device;
    device->stream = part->queue.stream;
    return CKD_OK;
}

/* ---- samples ---- */

/* Samples of sources in a part's memory, which are on their way to its memory for samples, DEVICE_SAMPLE_MAX apart. */
typedef struct sample_batch {
    const device_sample *sample[SAMPLES_AT_ONCE];
    size_t count;
    copies_together copies; /* not launched yet */
} sample_batch;

static device_result deliver(const device_snapshot *s, const snapshot_part *part, sample_batch *b,
                             device_failure *why) {
    device_result result = copy_batch(s, part, &b->copies, why);
    result = result == DEVICE_DONE ? s->backend->finish(&part->queue, why) : result;
    for (size_t i = 0; i < b->count && result == DEVICE_DONE; i++) {
        memcpy(b->sample[i]->to, part->sampled + i * DEVICE_SAMPLE_MAX, b->sample[i]->bytes);
    }
    b->count = 0;
    return result;
}

static device_result add_sample(const device_snapshot *s, const snapshot_part *part, sample_batch *b,
                                const device_sample *sample, device_failure *why) {
    device_result result = b->count == SAMPLES_AT_ONCE ? deliver(s, part, b, why) : DEVICE_DONE;
    const device_span span = {.to = part->sampled + b->count * DEVICE_SAMPLE_MAX,
                              .from = copy_of(s, sample->source) + sample->at,
                              .n = sample->bytes};
    b->sample[b->count++] = sample;
    return result == DEVICE_DONE ? add_copy(s, part, &b->copies, span, why) : result;
}

static ckd_status sample_part(device_snapshot *s, snapshot_part *part, const device_sample *samples,
                              size_t count, ckd_error *err) {
    device_failure why = {DEVICE_DONE, "", ""};
    device_result result = DEVICE_DONE;
    sample_batch *b = calloc(1, sizeof(*b));
    if (!b) {
        return err_nomem(err, sizeof(*b), "samples of a snapshot");
    }
    if (!part->sampled) {
        void *memory = NULL;
        result =
            s->backend->allocate_pinned(&memory, part->device, SAMPLES_AT_ONCE * DEVICE_SAMPLE_MAX, &why);
        part->sampled = result == DEVICE_DONE ? memory : NULL;
    }
    for (size_t i = 0; i < count && result == DEVICE_DONE; i++) {
        const source_place *place = &s->places[samples[i].source];
        if (place->part == part && place->home == HOME_DEVICE) {
            result = add_sample(s, part, b, &samples[i], &why);
        }
    }
    result = result == DEVICE_DONE ? deliver(s, part, b, &why) : result;
    free(b);
    return result == DEVICE_DONE ? CKD_OK : device_status(&why, part->device, err);
}

ckd_status device_snapshot_sample(device_snapshot *s, const device_sample *samples, size_t count,
                                  ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        const void *data;
        ckd_device device;
        status = device_snapshot_read(&data, &device, s, samples[i].source, err);
        if (status == CKD_OK && !device.struct_size) {
            memcpy(samples[i].to, (const uint8_t *)data + samples[i].at, samples[i].bytes);
        }
    }
    for (size_t i = 0; i < s->part_count && status == CKD_OK; i++) {
        if (s->parts[i].on_device > 0) {
            status = sample_part(s, &s->parts[i], samples, count, err);
        }
    }
    return status;
}
