-- remember: note which sample was the first to be fed with a prompt.
-- KEYS: prompts_fed shared_prompts told
-- ARGV: dataset shared samples...
--   shared: 1 if the prompt counts among those of all datasets that say so, 0 within its own alone
--   samples: (index digest) pairs, in the order in which they are fed
-- ANSWERS: one entry a sample: "dataset index" of the one that has its prompt
-- A sample that asks again is told of itself, so that a feed which was killed can be made again.
local key = ARGV[2] == '1' and KEYS[2] or KEYS[1]
local answers = {}
for at = 3, #ARGV, 2 do
  local own = ARGV[1] .. ' ' .. ARGV[at]
  redis.call('SETBIT', KEYS[3], ARGV[at], 1)
  if redis.call('HSETNX', key, ARGV[at + 1], own) == 0 then own = redis.call('HGET', key, ARGV[at + 1]) end
  answers[#answers + 1] = own
end
return answers
