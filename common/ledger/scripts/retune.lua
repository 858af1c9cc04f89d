-- retune: change a dataset's cap and weight, if they still are what the caller saw.
-- KEYS: state
-- ARGV: seen_cap_tokens seen_weight spec cap_tokens weight
--   cap 0 means no cap; spec: the settings with both, as JSON
-- ANSWERS: "moved" (somebody else has changed one of them, and nothing was done), "cancelled" (nothing was done),
--   "reopened" (a capped dataset whose cap now leaves room), or the state that it is in
-- A cap below what is spent closes the dataset at the keeper's next tick (admit); what is in flight still counts.
local old = redis.call('HMGET', KEYS[1], 'state', 'cap_tokens', 'weight', 'count', 'prompt_tokens', 'completion_tokens',
  'uncounted_prompt_tokens', 'uncounted_completion_tokens')
if old[1] == 'cancelled' then return 'cancelled' end
if tonumber(old[2]) ~= tonumber(ARGV[1]) or tonumber(old[3]) ~= tonumber(ARGV[2]) then return 'moved' end
redis.call('HSET', KEYS[1], 'spec', ARGV[3], 'cap_tokens', ARGV[4], 'weight', ARGV[5])
local spent = tonumber(old[6] or '0') - tonumber(old[8] or '0')
if old[4] == 'total' then spent = spent + tonumber(old[5] or '0') - tonumber(old[7] or '0') end
local cap, before = tonumber(ARGV[4]), tonumber(old[2])
if old[1] == 'capped' and before > 0 and (cap == 0 or (cap > before and cap > spent)) then
  redis.call('HSET', KEYS[1], 'state', 'open', 'reason', '')
  return 'reopened'
end
return old[1] or ''
