/* A scenario of power cuts: a folder that follows a run. A test of cmocka. */
#ifndef TESTS_SUPPORT_POWER_FOLLOW_H
#define TESTS_SUPPORT_POWER_FOLLOW_H

void power_follow(void **state);

#endif
