/*
 * Is a figure unlike those before it? Pure arithmetic, without a clock. Internal to engine/.
 *
 * The median of the last figures is what counts as normal. Their median absolute deviation (MAD) is how much they vary.
 * Outliers hardly change either, as long as they are less than half of the figures.
 */
#ifndef ENGINE_SENSORS_H
#define ENGINE_SENSORS_H

#include <stdbool.h>
#include <stdint.h>

#define SENSOR_WINDOW 64

typedef struct sensor_history {
    uint64_t count; /* figures so far; the window has the last ones */
    double values[SENSOR_WINDOW];
    bool alarmed; /* the last one was unlike the others */
} sensor_history;

/* A figure is unlike the others if it is farther from their median than each of these. */
typedef struct sensor_rule {
    uint32_t window;     /* how many of the last figures count; fewer follow a trend more closely */
    uint32_t warm_up;    /* how many figures are needed for a verdict */
    bool high, low;      /* the sides on which a figure is bad */
    double deviations;   /* MADs */
    double above, below; /* shares of the median */
    double distance;     /* in the unit of the figure */
} sensor_rule;

typedef enum sensor_verdict {
    SENSOR_UNKNOWN = 0, /* too few figures so far */
    SENSOR_NORMAL = 1,
    SENSOR_HIGH = 2,
    SENSOR_LOW = 3,
    SENSOR_NO_NUMBER = 4 /* NaN; also an infinity on no bad side, or before the warm-up has ended */
} sensor_verdict;

typedef struct sensor_reading {
    sensor_verdict verdict;
    double median;
    double limit; /* the limit that the figure exceeds; for a normal figure, the upper limit */
} sensor_reading;

/* Judges a figure. An infinity is high or low by its sign. */
sensor_reading sensor_judge(const sensor_history *history, const sensor_rule *rule, double value);
/*
 * Judges a figure and adds it to the history. Returns true if it is unlike the others and the one before it was not.
 * reading: may be NULL.
 */
bool sensor_observe(sensor_reading *reading, sensor_history *history, const sensor_rule *rule, double value);
/* The median of the history; 0: it is empty. */
double sensor_median(const sensor_history *history);

/* The figures that a session watches. docs/run.md has the figures, and DECISIONS.md the reasons. */
extern const sensor_rule sensor_size, sensor_time, sensor_change;
/*
 * Chooses the rule by the name of the metric. A loss is bad if it is high, an accuracy if it is low, and any other
 * metric on both sides.
 */
sensor_rule sensor_metric(const char *name);

#endif
