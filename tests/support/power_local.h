/* Scenarios of power cuts while an agent writes snapshots to a local disk. */
#ifndef TESTS_SUPPORT_POWER_LOCAL_H
#define TESTS_SUPPORT_POWER_LOCAL_H

void power_local(void **state);

#endif
