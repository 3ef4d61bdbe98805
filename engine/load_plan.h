/* Which blocks a load will read, and how often it would if it kept none. Internal to engine/; load_explain.c. */
#ifndef ENGINE_LOAD_PLAN_H
#define ENGINE_LOAD_PLAN_H

#include "codec/record.h"

typedef struct load_plan load_plan;

/* How often the plan's requests, and blocks that are decoded for them, use the block. Any number of threads may ask. */
uint32_t load_plan_uses(const load_plan *plan, const record *r);
void load_plan_free(load_plan *plan); /* accepts NULL */

#endif
