/* Alarms of a session about the training that it saves. Internal to engine/. */
#ifndef ENGINE_SESSION_ALARMS_H
#define ENGINE_SESSION_ALARMS_H

#include "engine/session/changes.h"
#include "engine/session/sensors.h"
#include "include/ckptdelta.h"

struct ckd_session;
struct session_slot;

#define METRIC_MEAN 4 /* steps: their mean varies half as much as one figure */

/* Only the trainer's thread uses this. */
typedef struct metric_alarms {
    sensor_history metric, means; /* figures; means of the last METRIC_MEAN of them */
    double last[METRIC_MEAN];
    uint64_t counted;  /* finite figures in a row */
    uint64_t since;    /* figures since the last alarm about a single one */
    uint64_t observed; /* the last step whose metric was judged; 0: none */
    bool has_metric;   /* the trainer has set a metric since the last step */
} metric_alarms;

/* The saver has this. */
typedef struct save_alarms {
    sensor_history size, distance, time[2], group_time[2]; /* times: of bases, of deltas */
    uint64_t last_step;                                    /* of the last durable save; 0: none */
    uint64_t weights;                                      /* hash of a sample of the weights at that save */
    uint64_t since_step;                                   /* of the first save with these weights */
    bool has_weights, has_changed, unchanged;
    changes changes; /* of large weights */
} save_alarms;

/* The times of one save, on the monotonic clock. */
typedef struct save_times {
    uint64_t begun_ns, handed_ns, ended_ns; /* handed: with ranks, when this rank had done its part; else 0 */
    uint64_t apart_ns;                      /* pauses, and waits for the trainer */
} save_times;

/* Called after a restore of this step: the next save does not continue from the last one. */
void session_alarms_restored(struct ckd_session *s, uint64_t step);
void session_alarms_free(struct ckd_session *s);
/* Judges the metric of a step, once. */
void session_judge_metric(struct ckd_session *s, uint64_t step, double metric);
/* Judges a durable save. Its snapshot is complete. */
void session_judge_save(struct ckd_session *s, const struct session_slot *slot, const ckd_checkpoint *saved,
                        const save_times *times);

#endif
