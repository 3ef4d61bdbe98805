/* Rules of policies about days, weeks and months. Internal to engine/retain/. */
#ifndef ENGINE_RETAIN_CALENDAR_H
#define ENGINE_RETAIN_CALENDAR_H

#include "engine/store/store.h"

/*
 * Marks the checkpoints of one run, by step, that keep_daily, keep_weekly and keep_monthly keep: of each of the newest periods in
 * which any was saved, the one with the highest step.
 */
ckd_status calendar_keep(ckd_retained *items, size_t count, const ckd_policy *p, ckd_error *err);

#endif
