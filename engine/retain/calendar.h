/* The rules of policies for days, weeks and months. Internal to engine/retain/. */
#ifndef ENGINE_RETAIN_CALENDAR_H
#define ENGINE_RETAIN_CALENDAR_H

#include "engine/store/store.h"

/*
 * Marks the checkpoints that keep_daily, keep_weekly and keep_monthly keep. items: the checkpoints of one run, by
 * step. Each of the newest periods with any checkpoint keeps the one with the highest step.
 */
ckd_status calendar_keep(ckd_retained *items, size_t count, const ckd_policy *p, ckd_error *err);

#endif
