/*
 * Alarms: figures of a session that are unlike those before. An alarm is a message, a count in the session's state, and
 * one in the slot of this process in the supervisor's memory. It marks no checkpoint, and ends nothing.
 */
#include "engine/session/alarms.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "engine/session/session.h"
#include "kernels/kernels.h"

#define WEIGHTS_MAX     (UINT64_C(16) << 20) /* bytes of the weights that are compared */
#define WEIGHTS_SLICE   DEVICE_SAMPLE_MAX
#define SLICES_AT_ONCE  64
#define STEPS_UNCHANGED 8 /* loss scalers of mixed precision may skip some steps in a row */

static void say(const ckd_session *s, uint64_t step, const char *text) {
    char message[700], who[32] = "";
    if (s->saver.ranks) {
        snprintf(who, sizeof(who), "rank %" PRIu32 ", ", s->save.rank);
    }
    if (s->store_options.on_message) {
        snprintf(message, sizeof(message), "%sstep %" PRIu64 ": %s", who, step, text);
        s->store_options.on_message(s->store_options.message_context, message);
    }
}

__attribute__((format(printf, 4, 5))) static void alarm_raise(ckd_session *s, ckd_alarm what, uint64_t step,
                                                              const char *format, ...) {
    char text[300];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&s->shared.mutex);
    s->shared.state.alarms++;
    s->shared.state.last_alarm = what;
    s->shared.state.last_alarm_step = step;
    pthread_mutex_unlock(&s->shared.mutex);
    if (s->reports) {
        ckd_progress_alarm(what, step);
    }
    if (what == CKD_ALARM_METRIC || what == CKD_ALARM_REPLICA || what == CKD_ALARM_CHANGE) {
        session_agent_doubt(s, step);
    }
    say(s, step, text);
}

void ckd_session_alarm(ckd_session *s, ckd_alarm alarm, uint64_t step, const char *text) {
    if (ckd_alarm_name(alarm)) {
        alarm_raise(s, alarm, step, "%s", text ? text : ckd_alarm_name(alarm));
    }
}

/* ---------------------------------------------------------------------------------------------------- the metric */

/* Judges a figure and the mean of the last ones, each once. A change that both show is one alarm. */
static bool is_unlike_others(sensor_reading *r, double *figure, metric_alarms *a, const sensor_rule *rule) {
    bool lasts = a->means.alarmed, single = sensor_observe(r, &a->metric, rule, *figure);
    a->since = single ? 0 : a->since + 1;
    a->counted = isfinite(*figure) ? a->counted + 1 : 0;
    a->last[a->counted % METRIC_MEAN] = *figure;
    double sum = 0;
    for (size_t i = 0; i < METRIC_MEAN; i++) {
        sum += a->last[i];
    }
    sensor_reading mean;
    bool recent = a->counted >= METRIC_MEAN && sensor_observe(&mean, &a->means, rule, sum / METRIC_MEAN);
    if (recent && a->since >= METRIC_MEAN) {
        *r = mean;
        *figure = sum / METRIC_MEAN;
        return true;
    }
    return single && (!lasts || r->verdict == SENSOR_NO_NUMBER);
}

void session_judge_metric(ckd_session *s, uint64_t step, double metric) {
    metric_alarms *a = &s->trainer.alarms;
    sensor_reading r;
    double figure = metric;
    const char *name = s->metric_name[0] ? s->metric_name : "metric";
    sensor_rule rule = sensor_metric(name);
    if (step <= a->observed) {
        return;
    }
    a->observed = step;
    if (!is_unlike_others(&r, &figure, a, &rule)) {
        return;
    }
    if (r.verdict == SENSOR_NO_NUMBER) {
        alarm_raise(s, CKD_ALARM_METRIC, step, "%s is %g", name, metric);
    } else {
        alarm_raise(s, CKD_ALARM_METRIC, step,
                    "%s%s is %.6g, and the median of the steps before is %.6g; %s %.6g would be normal",
                    a->since >= METRIC_MEAN ? "the mean of the last 4 values of " : "", name, figure,
                    r.median, r.verdict == SENSOR_HIGH ? "up to" : "from", r.limit);
    }
}

/* --------------------------------------------------------------------------------------------------- the weights */

/* A failure costs an alarm, but the save is complete. */
static bool read_samples(const ckd_session *s, const session_slot *slot, const session_sample *samples,
                         size_t count) {
    char text[600];
    ckd_error why;
    ckd_status status = session_read_samples(s, slot, samples, count, &why);
    if (status != CKD_OK) {
        snprintf(text, sizeof(text), "the weights are not compared with those of earlier saves: %s",
                 why.message);
        say(s, slot->step, text);
    }
    return status == CKD_OK;
}

static bool is_weight(const session_item *item) {
    const ckd_tensor *t = &item->tensor;
    ckd_role role = t->role == CKD_ROLE_AUTO ? ckd_role_of(t->name, t->dtype) : t->role;
    return !item->is_bytes && (role == CKD_ROLE_WEIGHT || role == CKD_ROLE_MASTER);
}

static void add_hash(uint64_t *hash, const void *data, size_t size) {
    *hash = *hash * UINT64_C(0x9e3779b97f4a7c15) + hash64(data, size);
}

static size_t slice_size(const session_item *item, uint64_t at) {
    return item->bytes - at < WEIGHTS_SLICE ? (size_t)(item->bytes - at) : WEIGHTS_SLICE;
}

/* Adds every nth slice of a tensor in host memory. */
static void hash_on_host(uint64_t *hash, const ckd_session *s, const session_slot *slot, size_t i,
                         uint64_t stride) {
    const uint8_t *data = snapshot_read(slot->snapshot, i);
    for (uint64_t at = 0; at < s->items[i].bytes; at += stride) {
        add_hash(hash, data + at, slice_size(&s->items[i], at));
    }
}

/* Slices of a tensor on a device, which come to the host together. */
typedef struct device_slices {
    session_sample slice[SLICES_AT_ONCE];
    uint8_t data[SLICES_AT_ONCE][WEIGHTS_SLICE];
} device_slices;

/* The same for a tensor on a device. False if it cannot be read. */
static bool hash_on_device(uint64_t *hash, device_slices *d, const ckd_session *s, const session_slot *slot,
                           size_t i, uint64_t stride) {
    const session_item *item = &s->items[i];
    bool readable = true;
    for (uint64_t at = 0; at < item->bytes && readable;) {
        size_t count = 0;
        for (; count < SLICES_AT_ONCE && at < item->bytes; at += stride, count++) {
            d->slice[count] = (session_sample){i, at, slice_size(item, at), d->data[count]};
        }
        readable = read_samples(s, slot, d->slice, count);
        for (size_t k = 0; k < count && readable; k++) {
            add_hash(hash, d->data[k], d->slice[k].bytes);
        }
    }
    return readable;
}

/* Returns false if the snapshot has no weights, or if they cannot be read. Large weights are sampled. */
static bool sample_weights(uint64_t *hash, const ckd_session *s, const session_slot *slot) {
    uint64_t total = 0, on_devices = 0;
    for (size_t i = 0; i < s->item_count; i++) {
        uint64_t size = is_weight(&s->items[i]) ? s->items[i].bytes : 0;
        total += size;
        on_devices += s->items[i].on_device ? size : 0;
    }
    device_slices *d = on_devices > 0 ? malloc(sizeof(*d)) : NULL;
    uint64_t stride = (total / WEIGHTS_MAX + 1) * WEIGHTS_SLICE;
    bool readable = total > 0 && (on_devices == 0 || d);
    *hash = 0;
    for (size_t i = 0; i < s->item_count && readable; i++) {
        const session_item *item = &s->items[i];
        if (is_weight(item) && item->on_device) {
            readable = hash_on_device(hash, d, s, slot, i, stride);
        } else if (is_weight(item)) {
            hash_on_host(hash, s, slot, i, stride);
        }
    }
    free(d);
    return readable;
}

/* Raises an alarm if weights that were trained before no longer change: the optimizer is frozen, or a rank is stuck. */
static void judge_weights(ckd_session *s, const session_slot *slot) {
    save_alarms *a = &s->saver.alarms;
    uint64_t weights;
    if (!sample_weights(&weights, s, slot)) {
        return;
    }
    bool same = a->has_weights && weights == a->weights;
    if (!same) {
        a->has_changed = a->has_weights;
        a->has_weights = true;
        a->weights = weights;
        a->since_step = slot->step;
        a->unchanged = false;
    } else if (a->has_changed && !a->unchanged && slot->step - a->since_step >= STEPS_UNCHANGED) {
        a->unchanged = true;
        alarm_raise(s, CKD_ALARM_UNCHANGED, slot->step,
                    "the weights are the same as at step %" PRIu64
                    ", and were trained before: does the optimizer still update them?",
                    a->since_step);
    }
}

/* ------------------------------------------------------------------------------------------- changes of weights */

static uint64_t elements_of(const session_item *item) {
    size_t size = ckd_dtype_size(item->tensor.dtype);
    return size > 0 ? item->bytes / size : 0;
}

static bool is_watched(const session_item *item) {
    ckd_dtype dtype = item->tensor.dtype;
    bool floats = dtype == CKD_F32 || dtype == CKD_BF16 || dtype == CKD_F16 || dtype == CKD_F64;
    return is_weight(item) && floats && elements_of(item) >= CHANGE_SAMPLE;
}

typedef struct sized_item {
    size_t item;
    uint64_t bytes;
} sized_item;

/* The larger one first. */
static int by_size(const void *a, const void *b) {
    const sized_item *x = a, *y = b;
    if (x->bytes != y->bytes) {
        return x->bytes < y->bytes ? 1 : -1;
    }
    return (x->item > y->item) - (x->item < y->item);
}

/* Chooses the largest weights. False if there are too few, or if memory is short. */
static bool make_changes(changes *c, const ckd_session *s) {
    sized_item *all = calloc(s->item_count + 1, sizeof(*all));
    size_t count = 0;
    for (size_t i = 0; all && i < s->item_count; i++) {
        if (is_watched(&s->items[i])) {
            all[count++] = (sized_item){i, s->items[i].bytes};
        }
    }
    if (count > CHANGES_MAX) {
        qsort(all, count, sizeof(*all), by_size);
        count = CHANGES_MAX;
    }
    bool made = count >= CHANGE_TENSORS && changes_make(c, count);
    for (size_t i = 0; made && i < count; i++) {
        c->tensors[i].item = all[i].item;
    }
    free(all);
    return made;
}

static void to_doubles(double *to, ckd_dtype dtype, const void *values, size_t n) {
    float floats[CHANGE_SAMPLE];
    if (dtype == CKD_F64) {
        memcpy(to, values, n * sizeof(*to));
    } else if (kernels_cpu()->widen(floats, dtype, values, n)) {
        for (size_t i = 0; i < n; i++) {
            to[i] = (double)floats[i];
        }
    }
}

/* Reads a tensor's sample from the snapshot. */
static bool read_sample(double out[CHANGE_SAMPLE], const ckd_session *s, const session_slot *slot, size_t i) {
    const session_item *item = &s->items[i];
    size_t size = ckd_dtype_size(item->tensor.dtype);
    uint64_t raw[CHANGE_SAMPLE]; /* of values of at most 8 bytes */
    session_sample slices[CHANGE_SLICES];
    for (size_t k = 0; k < CHANGE_SLICES; k++) {
        slices[k] = (session_sample){i, change_slice(elements_of(item), k) * size, CHANGE_SLICE * size,
                                     (uint8_t *)raw + k * CHANGE_SLICE * size};
    }
    if (!read_samples(s, slot, slices, CHANGE_SLICES)) {
        return false;
    }
    to_doubles(out, item->tensor.dtype, raw, CHANGE_SAMPLE);
    return true;
}

/* Sets the changes since the save before. False if a sample cannot be read: then the next save has none before it. */
static bool find_changes(changes *c, const ckd_session *s, const session_slot *slot) {
    for (size_t i = 0; i < c->count; i++) {
        double now[CHANGE_SAMPLE] = {0};
        if (!read_sample(now, s, slot, c->tensors[i].item)) {
            c->has_samples = false;
            return false;
        }
        c->found[i] = change_replace(c->samples + i * CHANGE_SAMPLE, now);
    }
    return true;
}

/* Raises an alarm if a tensor of weights has changed much more than it used to, compared with the others. */
static void judge_changes(ckd_session *s, const session_slot *slot) {
    changes *c = &s->saver.alarms.changes;
    change_alarm alarm;
    if ((!c->tensors && !make_changes(c, s)) || !find_changes(c, s, slot)) {
        return;
    }
    bool comparable = c->has_samples;
    c->has_samples = true;
    if (comparable && changes_judge(&alarm, c)) {
        const char *name = s->items[c->tensors[alarm.tensor].item].tensor.name;
        char more[48] = "";
        if (alarm.others > 0) {
            snprintf(more, sizeof(more), "; so did %zu more", alarm.others);
        }
        alarm_raise(
            s, CKD_ALARM_CHANGE, slot->step,
            "since the last save, %.150s has changed %.3g times as much as the median tensor; up to %.3g "
            "would be normal%s",
            name, alarm.ratio, alarm.reading.limit, more);
    }
}

/* ----------------------------------------------------------------------------------------- the size and the time */

/*
 * Saves that are closer together differ less. So a small delta after a short distance means nothing, nor does a large
 * one after a long distance.
 */
static void judge_size(ckd_session *s, const session_slot *slot, const ckd_checkpoint *saved) {
    save_alarms *a = &s->saver.alarms;
    sensor_reading r;
    if (saved->kind != CKD_DELTA || s->save.rank > 0 || a->last_step == 0) {
        return;
    }
    double distance = (double)(slot->step - a->last_step), usual = sensor_median(&a->distance);
    sensor_rule rule = sensor_size;
    rule.low = distance >= usual;
    rule.high = distance <= usual;
    (void)sensor_observe(NULL, &a->distance, &sensor_size, distance);
    double kib = (double)saved->stored_bytes / 1024;
    if (!sensor_observe(&r, &a->size, &rule, kib)) {
        return;
    }
    if (r.verdict == SENSOR_LOW) {
        alarm_raise(
            s, CKD_ALARM_UNCHANGED, slot->step,
            "the delta has %.6g KiB, and the median of those before is %.6g: hardly anything has changed",
            kib, r.median);
    } else {
        alarm_raise(
            s, CKD_ALARM_SIZE, slot->step,
            "the delta has %.6g KiB, and the median of those before is %.6g; up to %.6g would be normal", kib,
            r.median, r.limit);
    }
}

static void judge_time(ckd_session *s, uint64_t step, sensor_history *history, double seconds,
                       const char *what) {
    sensor_reading r;
    if (sensor_observe(&r, history, &sensor_time, seconds)) {
        alarm_raise(
            s, CKD_ALARM_TIME, step,
            "%s took %.3g s, and the median of those before is %.3g s: is the disk or this node slow?", what,
            seconds, r.median);
    }
}

static double seconds_between(uint64_t begun_ns, uint64_t ended_ns, uint64_t apart_ns) {
    uint64_t took = ended_ns > begun_ns ? ended_ns - begun_ns : 0;
    return (double)(took > apart_ns ? took - apart_ns : 0) / 1e9;
}

void session_judge_save(ckd_session *s, const session_slot *slot, const ckd_checkpoint *saved,
                        const save_times *times) {
    save_alarms *a = &s->saver.alarms;
    if (saved->suspect) {
        session_agent_doubt(s, slot->step);
    }
    judge_weights(s, slot);
    judge_changes(s, slot);
    judge_size(s, slot, saved);
    size_t kind = saved->kind == CKD_DELTA; /* a base takes much longer than a delta */
    if (times->handed_ns) {
        judge_time(s, slot->step, &a->time[kind],
                   seconds_between(times->begun_ns, times->handed_ns, times->apart_ns),
                   "this rank's part of the save");
    }
    if (!times->handed_ns || s->save.rank == 0) {
        judge_time(s, slot->step, &a->group_time[kind],
                   seconds_between(times->begun_ns, times->ended_ns, times->apart_ns), "the save");
    }
    a->last_step = slot->step;
}

void session_alarms_restored(ckd_session *s, uint64_t step) {
    save_alarms *a = &s->saver.alarms;
    s->trainer.alarms = (metric_alarms){.observed = step}; /* an earlier step has a higher loss */
    a->last_step = 0;
    a->has_weights = a->has_changed = a->unchanged = false;
    a->changes.has_samples = false;
}

void session_alarms_free(ckd_session *s) {
    changes_free(&s->saver.alarms.changes);
}
